#!/usr/bin/env bash
# Make the kit for a quarter of an hour on one GPU: wheels, the project, the driver. bench/quarter/quarter.sh runs it.
#
#     scripts/gpu_kit.sh          into .gpu/, for Python 3.12 and torch 2.11.0 with CUDA 13, on an H100 or H200;
#                                 PYTHON=/path/to/python3.12 names the interpreter
#     IMAGE=.venv scripts/gpu_kit.sh FOLDER      for the Python and torch of this environment, with the Horovod kept for it
#
# The environment and Horovod's wheel are kept for this machine in ${XDG_CACHE_HOME:-~/.cache}/hvdtrain. The kit is tested
# without a network at the end.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'gpu-kit: %s\n' "$*" >&2; }
kit=${1:-.gpu}
kept=${XDG_CACHE_HOME:-$HOME/.cache}/hvdtrain/gpu-kit
lock=requirements/gpu.lock
image=${IMAGE:-}
if [ -n "$image" ]; then
    image=$(cd "$image" && pwd)
else
    python=${PYTHON:-python3.12}
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null || true)
    if [ "$version" != 3.12 ]; then
        say "error: $python is not a Python 3.12 that starts. Name one: PYTHON=/path/to/python3.12 make gpu-kit"
        exit 2
    fi
    image=$kept/py312
    state=$(sha256sum "$lock" requirements/mpi.lock)
    if [ "$(cat "$image/stamp" 2>/dev/null || true)" != "$state" ]; then
        say "torch 2.11.0 and what the GPU's machine has, for Python 3.12: about 2.5 GB to download unless pip has them"
        "$python" -m venv --clear "$image"
        "$image/bin/python" -m pip --disable-pip-version-check install --quiet --require-hashes \
            --requirement "$lock" --requirement requirements/mpi.lock
        printf '%s\n' "$state" >"$image/stamp"
    fi
    export HOROVOD_CUDA_ARCHS=90 GPU=1
fi
export PATH=$image/bin:$PATH
rm -rf "$kit"
mkdir -p "$kit"
kit=$(cd "$kit" && pwd)
git ls-files --cached --others --exclude-standard -z | tar --null --files-from=- --ignore-failed-read -czf "$kit/project.tar.gz" 2>/dev/null
source=$(mktemp -d)
trap 'rm -rf "$source"' EXIT
tar -xzf "$kit/project.tar.gz" -C "$source"
"$source/scripts/wheels.sh" "$image" "$kit/wheels"
cp bench/quarter/quarter.sh "$kit/"

mib=$(du -sm "$kit" | cut -f 1)
if [ "$mib" -gt 40 ]; then
    say "error: $kit has $mib MiB, at most 40 can be taken along. Remove what is large: du -a $kit"
    exit 1
fi
say "proof without a network: imports, Horovod's build, 2 CPU ranks"
scripts/without_network.sh env WORK="$source/work" bash "$kit/quarter.sh" "$kit" "$source/output" 4 --rehearse --only first,mpi
built=$(scripts/without_network.sh env PATH="$source/work/venv/bin:$PATH" horovodrun --check-build)
if [ -z "${IMAGE:-}" ] && ! grep -qF '[X] NCCL' <<<"$built"; then
    say "error: Horovod in $kit has no NCCL. A CUDA 13 toolkit must be here: CUDA_HOME=/usr/local/cuda make gpu-kit"
    exit 1
fi
say "$kit is ready, $mib MiB: bash $(basename "$kit")/quarter.sh $(basename "$kit") OUTPUT 8.5"
