#!/usr/bin/env bash
# A quarter of an hour on one GPU, on a machine without a network whose python3 has torch.
#
#     bash .gpu/quarter.sh .gpu OUTPUT 8.5                        at most 8.5 minutes
#     bash .gpu/quarter.sh .gpu OUTPUT 2.6 --only NAME,NAME       more of it, in the same environment
#
# The wheels go into an environment beside the machine's packages: pip's --target would drop the lib/ of Open MPI.
set -euo pipefail
kit=$(cd "$1" && pwd) output=$2 minutes=$3 work=${WORK:-/tmp/hvdtrain-quarter}
shift 3
mkdir -p "$output" "$work"
if ! [ -e "$work/ready" ]; then
    python3 -m venv --without-pip "$work/venv"
    python3 -m pip --python "$work/venv/bin/python" install --quiet --no-index --no-deps --no-compile "$kit"/wheels/*.whl
    python3 -c 'import sysconfig; print("import site; site.addsitedir(%r)" % sysconfig.get_path("purelib"))' \
        >"$(echo "$work"/venv/lib/python3.*/site-packages)/machine.pth"
    mkdir -p "$work/project"
    tar -xzf "$kit/project.tar.gz" -C "$work/project"
    touch "$work/ready"
fi
if command -v ip >/dev/null; then ip link set lo up 2>/dev/null || true; fi # mpirun needs a network interface
PATH=$work/venv/bin:$(dirname "$(command -v python3)"):$PATH PYTHONPATH=$work/project PYTHONUNBUFFERED=1 \
    exec "$work/venv/bin/python" -m bench.quarter --work "$work" --output "$output" --minutes "$minutes" "$@"
