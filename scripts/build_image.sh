#!/usr/bin/env bash
# Build the image, with docker where its engine answers, else with buildah, which needs none.
#
#     scripts/build_image.sh [OPTION...]        options are the builder's own, as --no-cache
#
# IMAGE is its name (hvdtrain); BASE_IMAGE replaces the Dockerfile's, RUN_IMAGE too (else it is the same one); BUILDER
# is docker or buildah. CUDA=12.6 is for P100 and V100; TARGET=efa adds NCCL's plugin for EFA; GPU=0 builds Horovod for
# CPUs. This machine's pip.conf (PIP_CONFIG_FILE, /etc/pip.conf) and certificates (PIP_CERT) are lent to the steps in
# which pip runs.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

options=(--tag "${IMAGE:-hvdtrain}" --build-arg "REVISION=$(git describe --always --dirty || echo unknown)")
options+=(--target "${TARGET:-hvdtrain}" --build-arg "GPU=${GPU:-1}")
case ${CUDA:-} in
    "") ;;
    12.6)
        options+=(--build-arg "CUDA=$CUDA")
        if [ -z "${BASE_IMAGE:-}" ]; then
            BASE_IMAGE=nvidia/cuda:12.6.3-devel-ubuntu24.04 RUN_IMAGE=${RUN_IMAGE:-ubuntu:24.04}
        fi
        ;;
    *) echo "image: CUDA=$CUDA cannot be built: CUDA=12.6 is for P100 and V100, no CUDA for newer GPUs" >&2 && exit 2 ;;
esac
if [ -n "${BASE_IMAGE:-}" ]; then
    options+=(--build-arg "BASE_IMAGE=$BASE_IMAGE" --build-arg "RUN_IMAGE=${RUN_IMAGE:-$BASE_IMAGE}")
fi
pip_conf=${PIP_CONFIG_FILE:-/etc/pip.conf}
if [ -s "$pip_conf" ]; then options+=(--secret "id=pip.conf,src=$pip_conf"); fi
if [ -n "${PIP_CERT:-}" ]; then options+=(--secret "id=certificates,src=$PIP_CERT"); fi

builder=${BUILDER:-$(if docker info >/dev/null 2>&1; then echo docker; else echo buildah; fi)}
case $builder in
    docker) exec docker build "${options[@]}" "$@" . ;;
    buildah) ;;
    *) echo "image: BUILDER=$builder: docker or buildah" >&2 && exit 2 ;;
esac
if ! command -v buildah >/dev/null; then
    echo "image: no docker engine answers and there is no buildah: install one (Debian, Ubuntu: apt-get install buildah)" >&2
    exit 2
fi
exec buildah build --isolation chroot --format docker --layers "${options[@]}" "$@" .
