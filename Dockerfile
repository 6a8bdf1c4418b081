# hvdtrain with torch, Horovod and Open MPI: ranks on one host, or an ssh server for several.
#
#     make image                                 for NVIDIA GPUs
#     make image BASE_IMAGE=debian:12 GPU=0      Horovod for CPUs
#     make image CUDA=12.6                       for P100 and V100
#     make image TARGET=efa                      for AWS machines with EFA
#
# CUDA 13.0 is that of torch 2.14's wheels. The toolkit compiles Horovod and stays in the first stage.
ARG BASE_IMAGE=nvidia/cuda:13.0.3-devel-ubuntu24.04
# The base's distribution without the toolkit: torch brings its CUDA libraries, the host's driver is lent at run time.
ARG RUN_IMAGE=ubuntu:24.04

FROM ${BASE_IMAGE} AS build
RUN apt-get update \
    && apt-get install -y --no-install-recommends ca-certificates g++ make python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/hvdtrain/bin:$PATH
WORKDIR /build
COPY requirements requirements
ARG CUDA=
# The secrets are optional: a machine's own pip.conf and certificates, there for this one step.
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    python3 -m venv /opt/hvdtrain \
    && pip install --no-cache-dir --require-hashes -r "requirements/run-${CUDA:+cuda}${CUDA:-torch2.14}.lock" -r requirements/mpi.lock
COPY scripts/build_horovod.sh scripts/progress.sh scripts/cxx scripts/nvcc scripts/horovod_mpi.h scripts/
ARG GPU=1
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf \
    --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    wheel=$(scripts/build_horovod.sh /opt/hvdtrain/bin/python) \
    && pip install --no-cache-dir --no-deps "$wheel"
COPY scripts/openmpi_prefix.py scripts/
RUN python scripts/openmpi_prefix.py
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY hvdtrain hvdtrain
COPY launch launch
COPY packaging packaging
RUN pip install --no-cache-dir --no-deps --no-build-isolation . ./packaging/hvdlaunch

FROM ${RUN_IMAGE} AS hvdtrain
# ca-certificates: data sets come over https. g++, python3-dev: --compile needs them. ibverbs-providers: through it NCCL
# finds InfiniBand and RoCE. tini: a process 1 that passes signals on and buries orphans. The host keys that the
# server's package makes would be everyone's: the entrypoint makes new ones.
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        ca-certificates g++ ibverbs-providers openssh-server python3-dev tini \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/* /etc/ssh/ssh_host_*
# User 1000 is the first one of most cloud machines, so that mounted folders fit; Ubuntu's image has one already.
RUN if id ubuntu >/dev/null 2>&1; then userdel --remove ubuntu 2>/dev/null; fi \
    && useradd --uid 1000 --create-home --shell /bin/bash hvdtrain \
    && install -d -o hvdtrain -g hvdtrain -m 700 /home/hvdtrain/.ssh \
    && install -d -o hvdtrain -g hvdtrain /home/hvdtrain/runs /home/hvdtrain/data
COPY --from=build /opt/hvdtrain /opt/hvdtrain
COPY --chmod=755 scripts/entrypoint.sh /usr/local/bin/entrypoint
COPY --chown=hvdtrain hostfiles /home/hvdtrain/hostfiles
# NVIDIA_*: for container runtimes other than `docker run --gpus`; `utility` is NVML, which hvdlaunch asks.
ENV PATH=/opt/hvdtrain/bin:$PATH \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 1000
WORKDIR /home/hvdtrain
RUN --mount=type=bind,source=scripts/check_mpi.py,target=/tmp/check_mpi.py \
    horovodrun --check-build && python /tmp/check_mpi.py
ARG REVISION=unknown
ENV HVDTRAIN_COMMIT=${REVISION}
LABEL org.opencontainers.image.title=hvdtrain \
      org.opencontainers.image.description="EfficientNet and BERT training with PyTorch, Horovod and Open MPI" \
      org.opencontainers.image.licenses=Apache-2.0 \
      org.opencontainers.image.revision=${REVISION}
ENTRYPOINT ["tini", "--", "entrypoint"]
CMD ["hvdlaunch", "--help"]

FROM ${BASE_IMAGE} AS efa-build
RUN apt-get update \
    && apt-get install -y --no-install-recommends \
        autoconf automake ca-certificates curl g++ libhwloc-dev libibverbs-dev libtool make \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /build
COPY scripts/build_efa.sh scripts/
# Other versions, or a mirror of GitHub's: what the script reads from its environment.
ARG GITHUB
ARG LIBFABRIC
ARG LIBFABRIC_SHA256
ARG OFI_NCCL
ARG OFI_NCCL_SHA256
RUN --mount=type=secret,id=certificates,target=/etc/ssl/certs/ca-certificates.crt \
    scripts/build_efa.sh /opt/efa

FROM hvdtrain AS efa
USER 0
RUN apt-get update \
    && apt-get install -y --no-install-recommends libhwloc15 \
    && apt-get clean \
    && rm -rf /var/lib/apt/lists/*
COPY --from=efa-build /opt/efa /opt/efa
# The loader's cache, since ssh passes no LD_LIBRARY_PATH on. libfabric opens libcudart.so, which torch's packages have
# under its full name.
RUN ln -s "$(find /opt/hvdtrain -name 'libcudart.so.*')" /opt/efa/lib/libcudart.so \
    && echo /opt/efa/lib >/etc/ld.so.conf.d/efa.conf \
    && ldconfig
USER 1000
RUN python -c 'import ctypes; ctypes.CDLL("libnccl-net.so")'

# What `docker build .` makes.
FROM hvdtrain
