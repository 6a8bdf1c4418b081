"""The device of each rank: one GPU for one rank, or the CPU; and how torch computes on it."""

import os
import socket

import torch

from hvdtrain.ranks import cores
from hvdtrain.ranks.comm import Comm, SerialComm
from hvdtrain.safety.exits import BadInput


def choose_device(comm: Comm) -> torch.device:
    """This rank's GPU: index 0 when one is visible, else the local rank's; the CPU where there is no GPU.

    Raises BadInput where the host has fewer visible GPUs than ranks, or Horovod has no NCCL to sum on them.
    """
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu_count == 0:
        return torch.device("cpu")
    if gpu_count > 1 and comm.local_rank >= gpu_count:
        raise BadInput(
            f"{socket.gethostname()}: {comm.local_size} ranks exceed the {gpu_count} visible GPUs. Start at most "
            f"{gpu_count} ranks there."
        )
    if comm.size > 1 and not has_nccl():
        raise BadInput(
            "Horovod was built without NCCL: GPUs would all-reduce their gradients on the CPU. Build it again where "
            "the CUDA toolkit is (CUDA_HOME=/usr/local/cuda make setup), or train on CPUs (CUDA_VISIBLE_DEVICES=, "
            "or hvdlaunch's --gpus none)."
        )
    device = torch.device("cuda", 0 if gpu_count == 1 else comm.local_rank)
    torch.cuda.set_device(device)
    return device


def has_nccl() -> bool:
    """Whether this Horovod was built with NCCL."""
    import horovod.torch as hvd

    return bool(hvd.nccl_built())


def require_own_device(comm: Comm, device: torch.device) -> None:
    """Raise BadInput on all ranks where two ranks share one GPU, compared by host and UUID."""
    own_uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, uuid) in enumerate(comm.allgather([socket.gethostname(), own_uuid])):
        if uuid is None:
            continue
        if (host, uuid) in owners:
            raise BadInput(
                f"ranks {owners[host, uuid]} and {rank} on {host}: both use GPU {uuid}. Give each rank its own GPU, "
                "or start one rank per GPU."
            )
        owners[host, uuid] = rank


def share_cores(comm: Comm) -> None:
    """Let torch's threads be this rank's share of its host's cores, unless OMP_NUM_THREADS says otherwise."""
    if type(comm) is not SerialComm and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores.count_host_cores(comm.local_size) // comm.local_size))


def set_arithmetic(*, deterministic: bool, tf32: bool) -> None:
    """Let torch compute alike in each run, or as fast as it can, and on a GPU in TF32 or not."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
    # It looks for the fastest kernels once for each shape. Training has two, of whole batches and of an epoch's last
    # one; evaluation has the same whole batches, and adds its own last one.
    torch.backends.cudnn.benchmark = not deterministic
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32
