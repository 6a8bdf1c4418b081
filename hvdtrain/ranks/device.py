"""The device of each rank: one GPU for one rank, or the CPU."""

import socket

import torch

from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput


def choose_device(comm: Comm) -> torch.device:
    """This rank's GPU: index 0 when one is visible, else the local rank's; the CPU where there is no GPU.

    Raises BadInput where the host has fewer visible GPUs than ranks, or Horovod has no NCCL to sum on them.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible == 0:
        return torch.device("cpu")
    if visible > 1 and comm.local_rank >= visible:
        raise BadInput(
            f"{socket.gethostname()} has {comm.local_size} ranks but {visible} visible GPUs: "
            f"start at most {visible} ranks there"
        )
    if comm.size > 1 and not has_nccl():
        raise BadInput(
            "Horovod was built without NCCL, so GPUs would sum their gradients on the CPU: rebuild it where the CUDA "
            "toolkit is, with CUDA_HOME=/usr/local/cuda make setup, or train on CPUs, with CUDA_VISIBLE_DEVICES= or "
            "hvdlaunch's --gpus none"
        )
    device = torch.device("cuda", 0 if visible == 1 else comm.local_rank)
    torch.cuda.set_device(device)
    return device


def has_nccl() -> bool:
    """Whether this Horovod was built with NCCL."""
    import horovod.torch as hvd

    return bool(hvd.nccl_built())


def require_own_device(comm: Comm, device: torch.device) -> None:
    """Raise BadInput on all ranks where two ranks share one GPU, compared by host and UUID."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    owners: dict[tuple[str, str], int] = {}
    for rank, (host, theirs) in enumerate(comm.allgather([socket.gethostname(), uuid])):
        if theirs is None:
            continue
        if (host, theirs) in owners:
            raise BadInput(
                f"ranks {owners[host, theirs]} and {rank} on {host} were both given GPU {theirs}: "
                "give each rank its own, or start one rank per GPU"
            )
        owners[host, theirs] = rank
