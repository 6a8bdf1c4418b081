"""The device of each rank (a GPU of its own, or the CPU), and torch's arithmetic on it."""

import os
import socket

import torch

from hvdtrain.ranks import cores
from hvdtrain.ranks.comm import Comm, SerialComm
from hvdtrain.ranks.libraries import sees_gpus
from hvdtrain.settings.safety.exits import BadInput


def choose_device(comm: Comm) -> torch.device:
    """Return this rank's GPU: index 0 if one is visible, else the local rank's; the CPU without a GPU.

    Raise BadInput if the host has GPUs that torch cannot use, or fewer visible ones than ranks, or if Horovod was built
    without NCCL.
    """
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu_count == 0:
        if sees_gpus():
            raise BadInput(
                f"{socket.gethostname()}: torch {torch.__version__} with CUDA {torch.version.cuda} cannot use this "
                "host's GPUs, perhaps because the driver is too old for it (see nvidia-smi). Set up a torch that fits "
                "(docs/how-to/install.md), or train on CPUs (CUDA_VISIBLE_DEVICES=, or hvdlaunch's --gpus none)."
            )
        return torch.device("cpu")
    if gpu_count > 1 and comm.local_rank >= gpu_count:
        raise BadInput(
            f"{socket.gethostname()}: {comm.local_size} ranks exceed the {gpu_count} visible GPUs. Start at most "
            f"{gpu_count} ranks there."
        )
    if comm.size > 1 and not has_nccl():
        raise BadInput(
            "Horovod was built without NCCL: GPUs would all-reduce their gradients on the CPU. Build it again (GPU=1 "
            "make setup), or train on CPUs (CUDA_VISIBLE_DEVICES=, or hvdlaunch's --gpus none)."
        )
    device = torch.device("cuda", 0 if gpu_count == 1 else comm.local_rank)
    torch.cuda.set_device(device)
    return device


def has_nccl() -> bool:
    """Return whether Horovod was built with NCCL."""
    import horovod.torch as hvd

    return bool(hvd.nccl_built())


def require_own_device(comm: Comm, device: torch.device) -> None:
    """Raise BadInput on all ranks if two ranks share one GPU, compared by host and UUID."""
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
    """Set torch's threads to this rank's share of its host's cores, unless OMP_NUM_THREADS is set."""
    if type(comm) is not SerialComm and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, cores.count_host_cores(comm.local_size) // comm.local_size))


# cuDNN tries its kernels once per shape: 20 s of an H100 for efficientnet_tiny, 40 s for b0, which fewer steps do not
# gain. Training has two shapes, whole batches and the last batch of an epoch; evaluation adds its own last one.
STEPS_WORTH_TRIALS = 1000


def set_arithmetic(*, deterministic: bool, tf32: bool) -> None:
    """Make torch deterministic or not, and allow TF32 on GPUs or not."""
    if deterministic:
        torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = tf32


def set_trials_of_kernels(*, deterministic: bool, steps: int) -> None:
    """Let cuDNN try its kernels in the first steps if the run has enough of them."""
    torch.backends.cudnn.benchmark = not deterministic and steps >= STEPS_WORTH_TRIALS
