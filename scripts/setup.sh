#!/usr/bin/env bash
# Make .venv: packages with hashes, one MPI, Horovod built for both, and a proof that they work together.
#
#     scripts/setup.sh          PYTHON=python3.12 chooses the interpreter
#     MPI=5 scripts/setup.sh    .venv-mpi5 with Open MPI 5, whose ranks outlive one that dies (--elastic)
#     CUDA=12.6 scripts/setup.sh    .venv-cuda12.6 with torch 2.7.1, the last one on PyPI for P100 and V100
#
# Nothing is done when nothing changed. What is missing on the machine is named before anything is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

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
cuda=${CUDA:+-cuda$CUDA}
venv=$PWD/.venv${MPI:+-mpi$MPI}$cuda
stamp=$venv/setup.stamp

# An active environment must not lend its mpirun or its nvcc: the machine decides.
PATH=$(printf '%s' "$PATH" | tr : '\n' | grep -vxF -e "$venv/bin" -e "${VIRTUAL_ENV:-$venv}/bin" | paste -sd :)

if [ "${MPI:-}" = 5 ]; then
    mpi="Open MPI from requirements-mpi5.lock"
elif command -v mpirun >/dev/null && command -v mpicxx >/dev/null; then
    mpi="the system's, $(command -v mpirun)"
else
    mpi="Open MPI from requirements-mpi.lock"
fi
state=$(
    echo "$venv $mpi ${PYTHON:-} ${CUDA_HOME:-} $(command -v nvcc || true)"
    sha256sum requirements*.lock pyproject.toml packaging/hvdlaunch/pyproject.toml scripts/{setup.sh,build_horovod.sh,check_mpi.py,cxx17}
)
if [ -e "$stamp" ] && [ "$(cat "$stamp")" = "$state" ]; then exit 0; fi

python=${PYTHON:-python3}
command -v "$python" >/dev/null ||
    refuse "no $python on PATH: install Python 3.11, 3.12 or 3.13 (Debian, Ubuntu: apt-get install python3 python3-venv python3-dev)"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
case $version in
    3.11 | 3.12 | 3.13) ;;
    *) refuse "$python is Python $version, which torch and Horovod 0.28 do not support together: use 3.11, 3.12 or 3.13, as in PYTHON=python3.12 make setup" ;;
esac
"$python" -c 'import ensurepip, venv' 2>/dev/null ||
    refuse "$python cannot make virtual environments: install them (Debian, Ubuntu: apt-get install python$version-venv)"
[ -e "$("$python" -c 'import sysconfig; print(sysconfig.get_path("include"))')/Python.h" ] ||
    refuse "$python has no headers (Python.h), which Horovod's build needs: install them (Debian, Ubuntu: apt-get install python$version-dev)"
for tool in g++ make; do
    command -v $tool >/dev/null ||
        refuse "no $tool on PATH, which Horovod's build needs: install it (Debian, Ubuntu: apt-get install g++ make; Red Hat: dnf install gcc-c++ make)"
done
# What one environment takes with the CUDA packages of torch, and a little for the build.
need_gb=6
if ! [ -e "$stamp" ]; then
    free_mb=$(df --output=avail --block-size=1M "$PWD" | tail -n 1)
    free_gb=$((free_mb / 1024))
    [ "$free_gb" -ge "$need_gb" ] ||
        refuse "$free_gb GB free at $PWD, $need_gb GB are needed: free some, or put the clone on a larger disk"
fi

rm -f "$stamp"
if ! [ -x "$venv/bin/python" ] || [ "$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" != "$version" ]; then
    say "Python $version at $(command -v "$python") -> ${venv##*/}"
    "$python" -m venv --clear "$venv"
fi
pip=("$venv/bin/python" -m pip --disable-pip-version-check)
say "MPI: $mpi"
locks=(--requirement="requirements$cuda.lock")
case $mpi in Open*)
    locks+=(--requirement="${mpi##* }")
    PATH=$venv/bin:$PATH
    ;;
esac
say "packages (about 2.5 GB to download unless pip has them)"
"${pip[@]}" install --quiet --require-hashes "${locks[@]}"

# Beside Horovod's build, which needs none of it. When that fails, pip still ends what it does: a package that it leaves
# half installed would count as installed.
"${pip[@]}" install --quiet --require-hashes "${locks[@]}" --requirement="requirements$cuda-dev.lock" &
dev=$!
trap 'wait $dev || true' EXIT
trap 'kill $dev; exit 130' INT # which pip, in the background, ignores
wheel=$(scripts/build_horovod.sh "$venv/bin/python")
wait $dev || { say "pip could not install requirements$cuda-dev.lock: its message is above" && exit 1; }
trap - EXIT INT
"${pip[@]}" install --quiet --no-deps --no-build-isolation --force-reinstall "$wheel" --editable . --editable packaging/hvdlaunch

say "proof: a 2-rank all-reduce through mpi4py and through Horovod"
"$venv/bin/python" scripts/check_mpi.py
printf '%s\n' "$state" >"$stamp"
say "ready: . ${venv##*/}/bin/activate"
