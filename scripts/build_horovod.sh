#!/usr/bin/env bash
# Build the Horovod wheel for one Python environment, or take it from the cache.
#
#     scripts/build_horovod.sh PYTHON      prints the wheel's path on standard output
#
# PYTHON's environment must hold torch's files and the group horovod of pyproject.toml, but not what torch needs to be
# imported. mpirun and mpicxx on PATH are the MPI it is built against.
# The wheel has NCCL operations, linked to the NCCL that torch ships, and kernels by the CUDA toolkit of the machine, or
# else by the compiler of torch's CUDA on PyPI, which is there for the build alone. With GPU=0, or without a compiler
# that fits, it is for CPUs.
# HOROVOD_CUDA_ARCHS=90 compiles its kernels for these compute capabilities only.
# The cache is ${XDG_CACHE_HOME:-~/.cache}/hvdtrain/horovod/<key>/; key.txt beside the wheel is what the key hashes.
set -euo pipefail

python=$1
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
lock=$here/../requirements/horovod.lock
. "$here/progress.sh"
say() { printf 'horovod: %s\n' "$*" >&2; }
# The root of the CUDA toolkit, asked of nvcc itself: the nvcc on PATH may be a link or a wrapper.
cuda_root() {
    local nvcc top
    nvcc=$(if [ -n "${CUDA_HOME:-}" ]; then echo "$CUDA_HOME/bin/nvcc"; else command -v nvcc || echo /usr/local/cuda/bin/nvcc; fi)
    [ -x "$nvcc" ] || return 1
    top=$("$nvcc" --dryrun -x cu -c /dev/null -o /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    (cd "${top:?nvcc names no root}" && pwd -P)
}

# Without importing torch, which takes seconds and may have no libraries yet.
{ read -r soabi; read -r torch_home; read -r torch; read -r torch_cuda; read -r nccl_version; read -r nccl; } < <("$python" - <<'ASK'
import runpy
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

[folder] = find_spec("torch").submodule_search_locations
torch = runpy.run_path(f"{folder}/version.py")
print(sysconfig.get_config_var("SOABI"))
print(folder)
print(torch["__version__"])
print(torch["cuda"] or "")
try:
    print(version(f"nvidia-nccl-cu{(torch['cuda'] or '').partition('.')[0]}"))
    print(next(iter(find_spec("nvidia.nccl").submodule_search_locations)))
except PackageNotFoundError:
    print("\n")
ASK
)
compiler=$here/../requirements/nvcc-$torch_cuda.lock
cuda= remedy="install the CUDA ${torch_cuda%%.*} toolkit"
if [ "${GPU:-1}" = 0 ]; then
    reason="GPU=0"
elif [ -z "$torch_cuda" ]; then
    reason="this torch is a CPU build" remedy="install a torch for CUDA"
elif [ -z "$nccl" ]; then
    reason="this torch came without the package of NCCL" remedy="install nvidia-nccl-cu${torch_cuda%%.*} beside it"
else
    if ! root=$(cuda_root); then
        reason="no CUDA toolkit (no nvcc in ${CUDA_HOME:-PATH or /usr/local/cuda})"
    else
        toolkit=$("$root/bin/nvcc" --version | sed -n 's/.*release \([0-9.]*\),.*/\1/p')
        if [ "${toolkit%%.*}" != "${torch_cuda%%.*}" ]; then
            reason="CUDA toolkit $toolkit at $root does not fit torch's CUDA $torch_cuda"
        elif ! [ -e "$root/lib64/libcudart.so" ] || ! [ -e "$root/include/cuda_runtime.h" ]; then
            reason="CUDA toolkit at $root lacks lib64/libcudart.so or include/cuda_runtime.h"
        else
            cuda=$root
            reason="CUDA toolkit $toolkit at $root"
        fi
    fi
    if [ -z "$cuda" ] && [ -e "$compiler" ]; then
        cuda=compiler toolkit="$torch_cuda, compiler from PyPI"
        reason+="; the compiler of CUDA $torch_cuda comes from PyPI, for this build alone"
    fi
fi
if [ -n "$cuda" ]; then
    say "NCCL operations on GPUs and MPI on CPUs: NCCL $nccl_version from torch's packages, $reason"
else
    say "MPI on CPUs only: $reason"
    if [ "${GPU:-1}" = 1 ]; then
        say "WARNING: this Horovod uses no GPU: $remedy and run this again"
    fi
fi

case $torch_cuda in # those that torch's own kernels are for
    12.6) archs=60,70,75,80,86,90 ;;
    *) archs=75,80,86,89,90,100,120 ;;
esac
archs=${HOROVOD_CUDA_ARCHS:-$archs}
mpi=$(mpirun --version | head -n 1)
system_mpi=
case $(command -v mpicxx) in
    "$("$python" -c 'import sys; print(sys.prefix)')"/*) ;;
    *) system_mpi=$(mpicxx -show) ;;
esac
key_text=$(
    grep -v '^#' "$lock"
    echo "python: $soabi"
    echo "torch: $torch"
    echo "mpi: $mpi $system_mpi"
    echo "cuda: ${cuda:+$toolkit, NCCL $nccl_version, architectures $archs}"
    echo "compiler: $(g++ --version | head -n 1)"
    echo "glibc: $(getconf GNU_LIBC_VERSION)"
    echo "build: $(cat "$here"/{cxx,nvcc,horovod_mpi.h,build_horovod.sh} | sha256sum)"
)
key=$(printf '%s' "$key_text" | sha256sum | cut -c 1-16)
kept=${XDG_CACHE_HOME:-$HOME/.cache}/hvdtrain/horovod/$key
take_kept() {
    compgen -G "$kept/*.whl" >/dev/null || return 0
    say "wheel from $kept"
    ls "$kept"/*.whl
    exit
}
take_kept

mkdir -p "$(dirname "$kept")"
exec 9>>"$kept.lock" # released when this process ends, however: what it starts does not inherit it
builder=
for ((second = 1; ; second++)); do
    flock -w 1 9 && break
    [ $? = 1 ] || break # a file system without locks
    found=$(cat "$kept.lock" 2>/dev/null || true) # its builder may just have removed it
    if [ -n "$found" ] && [ "$found" != "$builder" ]; then
        builder=$found
        clear_line
        say "waiting for $builder, which builds the same wheel"
    fi
    show_progress horovod "$second" waiting
done
clear_line
take_kept
printf 'process %s on %s in %s\n' $$ "$HOSTNAME" "${here%/*}" >"$kept.lock"
build=$(mktemp -d "$kept.XXXXXX")
trap 'end_progress; rm -rf "$build"' EXIT
if [ "$cuda" = compiler ]; then
    say "compiler (about 140 MB to download unless pip has it)"
    "$python" -m pip --disable-pip-version-check install --quiet --no-deps --no-compile --require-hashes \
        --target "$build/compiler" --requirement "$compiler"
    cuda=$(echo "$build"/compiler/nvidia/cu*)
    ln -s lib "$cuda/lib64" # as a toolkit has them
    ln -s "$(cd "$cuda/lib" && echo libcudart.so.*)" "$cuda/lib/libcudart.so"
fi
if [ -n "$cuda" ]; then
    mkdir -p "$build/nccl/lib"
    ln -s "$nccl/include" "$build/nccl/include"
    ln -s "$nccl/lib/libnccl.so.2" "$build/nccl/lib/libnccl.so"
    mkdir -p "$build/cuda/bin" # the toolkit, with our nvcc in front of its own
    ln -s "$(cd "$cuda" && pwd)"/[!b]* "$build/cuda/"
    ln -s "$here/nvcc" "$build/cuda/bin/nvcc"
    export CUDA_HOME=$cuda HOROVOD_CUDA_HOME=$build/cuda HOROVOD_GPU_OPERATIONS=NCCL HOROVOD_NCCL_LINK=SHARED
    export HOROVOD_NCCL_HOME=$build/nccl HOROVOD_BUILD_CUDA_CC_LIST=$archs
else
    unset CUDA_HOME CUDA_PATH
fi
# Horovod asks torch eight questions, each after an import. These are the answers, also of a torch that cannot be
# imported yet; and none about a toolkit that is there, as on PATH, but is not to be used.
mkdir -p "$build/python/torch/utils"
cp "$torch_home/version.py" "$build/python/torch/"
cat >"$build/python/torch/__init__.py" <<'TORCH'
from torch.version import __version__


class torch:
    compiled_with_cxx11_abi = staticmethod(lambda: True)  # each wheel since 2.7
TORCH
cat >"$build/python/torch/utils/cpp_extension.py" <<'TORCH'
import os

TORCH = os.environ["TORCH_FILES"]
CUDA_HOME, ROCM_HOME = os.environ.get("CUDA_HOME"), None


class CppExtension:
    def __init__(self, name, sources):
        self.include_dirs = [f"{TORCH}/include", f"{TORCH}/include/torch/csrc/api/include"]
        self.library_dirs = [f"{TORCH}/lib"]
        self.libraries = ["c10", "torch", "torch_cpu", "torch_python"]


class CUDAExtension(CppExtension):
    def __init__(self, name, sources):
        super().__init__(name, sources)
        self.include_dirs += [f"{CUDA_HOME}/include"]
        self.library_dirs += [f"{CUDA_HOME}/lib64"]
        self.libraries += ["cudart", "c10_cuda", "torch_cuda"]
TORCH
export PYTHONPATH=$build/python TORCH_FILES=$torch_home
TORCH_CXX=$(grep -qs 'C++20 or later' "$torch_home/include/ATen/ATen.h" && echo 20 || echo 17)
export TORCH_CXX
# All targets would be the CUDA kernels twice, once more for a torch with the C++ ABI of old.
cat >"$build/cmake" <<'CMAKE'
#!/bin/sh
case $1 in --build) shift 2 && set -- --build . --target pytorch "$@" ;; esac
exec cmake "$@"
CMAKE
chmod +x "$build/cmake"
say "building, about $([ -n "$cuda" ] && echo 5 || echo 2) minutes on 2 cores; log: $kept.log"
started=$SECONDS
percent() { echo "building$(grep -oE '^ *\[ *[0-9]+%\]' "$kept.log" | tail -n 1 | sed 's/.*[[ ]\([0-9]*\)%.*/, \1 %/')"; }
start_progress horovod percent
status=0
PATH=$(dirname "$python"):$PATH HOROVOD_CMAKE=$build/cmake CXX=$here/cxx MAKEFLAGS=-j$(nproc) CMAKE_POLICY_VERSION_MINIMUM=3.5 \
    HOROVOD_WITH_PYTORCH=1 HOROVOD_WITHOUT_TENSORFLOW=1 HOROVOD_WITHOUT_MXNET=1 HOROVOD_WITH_MPI=1 HOROVOD_WITH_GLOO=1 \
    "$python" -m pip wheel --verbose --no-deps --no-build-isolation --require-hashes --no-cache-dir --no-binary :all: \
    --requirement "$lock" --wheel-dir "$build/wheel" >"$kept.log" 2>&1 9>&- || status=$?
end_progress
if [ $status != 0 ]; then
    tail -n 30 "$kept.log" >&2
    grep -m 5 -E 'error: |undefined reference' "$kept.log" >&2 || true
    say "the build failed; the whole log is $kept.log"
    exit 1
fi
printf '%s\n' "$key_text" >"$build/wheel/key.txt"
# Without locks another set-up may have finished first: then its wheel is as good.
mv -T "$build/wheel" "$kept" 2>/dev/null || [ -e "$kept/key.txt" ]
rm -f "$kept.log" "$kept.lock" # whoever waited for the lock finds the wheel
say "built in $((SECONDS - started)) s, kept in $kept"
ls "$kept"/*.whl
