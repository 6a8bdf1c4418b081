#!/usr/bin/env bash
# Build libfabric and NCCL's plugin for EFA, the network of AWS p4d and p5, from the sources of their releases.
#
#     scripts/build_efa.sh PREFIX
#
# Needs a CUDA toolkit with nvml.h, autotools, libhwloc-dev and libibverbs-dev. LIBFABRIC and OFI_NCCL are versions,
# LIBFABRIC_SHA256 and OFI_NCCL_SHA256 are of the archives of their tags at GITHUB, which may be a mirror.
# aws-ofi-nccl 1.20.0 was tested by Amazon with NCCL 2.28.9 and libfabric 2.4.0.
set -euo pipefail

prefix=$1
cuda=${CUDA_HOME:-/usr/local/cuda}
build=$(mktemp -d)
trap 'rm -rf "$build"' EXIT

# REPOSITORY VERSION SHA256: its source becomes the folder we are in.
source_of() {
    mkdir "$build/${1#*/}" && cd "$build/${1#*/}"
    curl --fail --silent --show-error --location --output ../source "${GITHUB:-https://github.com}/$1/archive/v$2.tar.gz"
    echo "$3  ../source" | sha256sum --check --quiet
    tar --extract --gzip --strip-components=1 --file=../source
}

source_of ofiwg/libfabric "${LIBFABRIC:-2.4.0}" \
    "${LIBFABRIC_SHA256:-37c6415ba8a4c7a24529406187ad5084bb87ad904d5542ac82dac66807c4fb29}"
./autogen.sh
# It opens libcudart.so when it runs, along its own path: a machine without a GPU can load it, too.
./configure --prefix="$prefix" --disable-static --disable-verbs --disable-psm3 --disable-usnic --enable-efa \
    --with-cuda="$cuda" --enable-cuda-dlopen LDFLAGS="-Wl,-rpath,$prefix/lib"
make -j"$(nproc)" install

source_of aws/aws-ofi-nccl "${OFI_NCCL:-1.20.0}" \
    "${OFI_NCCL_SHA256:-e0e26aa96335f72c9e471ee4f3e2d140e6c6812ec6720b0f301de05fb3f77372}"
echo "${OFI_NCCL:-1.20.0}" >.release_version # its configure wants git, or this
./autogen.sh
./configure --prefix="$prefix" --with-libfabric="$prefix" --with-cuda="$cuda" --enable-platform-aws --disable-tests
make -j"$(nproc)" install
