"""Limits that control groups, version 1 or 2, set on CPU time and memory, and whether a host's ranks fit into them."""

import math
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path, PurePosixPath

from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import FIRST_ERROR_S, BadInput

# Unshared memory of a rank that has imported torch and this package: 279 to 366 MB measured on Linux.
IMPORT_MB = 350
# Local rank and number of local ranks: Open MPI, Horovod's Gloo, MPICH and Intel MPI.
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


def cpu_quota(root: Path) -> float:
    """Return the CPU time that the control groups allow, in cores; infinite without a limit."""
    limits = [math.inf]
    for folder in _folders(root, "cpu"):
        texts = [_read_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
        match " ".join(texts).split():  # for example 150000 100000, in either version; max or -1 means no limit
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                limits.append(int(quota) / int(period))
    return min(limits)


def memory_bytes(root: Path) -> float:
    """Return the memory of the host, or the control groups' limit, including used memory; infinite if unknown."""
    lines = _read_text(root / "proc/meminfo").splitlines()
    total = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    files = ("memory.max", "memory.limit_in_bytes")  # of version 2 and version 1; max means no limit
    limits = [_read_text(folder / file).strip() for folder in _folders(root, "memory") for file in files]
    return min([math.inf, *total, *(int(text) for text in limits if text.isdecimal())])


def free_memory_bytes(root: Path) -> float:
    """Return the memory that this process can still use without swapping, by its host and its control groups."""
    lines = _read_text(root / "proc/meminfo").splitlines()
    free: list[float] = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    for folder in _folders(root, "memory"):
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            limit, used = (_read_text(folder / name).strip() for name in names)
            if limit.isdecimal() and used.isdecimal():
                entries = dict(line.split() for line in _read_text(folder / "memory.stat").splitlines())
                free.append(int(limit) - int(used) + int(entries.get("inactive_file", 0)))  # cached files give way
    return min([math.inf, *free])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process by a controller, innermost first."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        groups = (PurePosixPath(path), *PurePosixPath(path).parents)  # a container sees its own group as the root
        mounts = {controllers, controller if controllers else ""}  # cpu,cpuacct, and a link to it
        for mount, group in product(mounts, groups):
            yield root / "sys/fs/cgroup" / mount / str(group).lstrip("/")


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def require_room(environment: Mapping[str, str], root: Path = Path("/")) -> None:
    """End this process with status 2 if the ranks of its host do not fit into its memory; the first rank reports it.

    The check uses total and not free memory, so that all ranks reach the same result however many have already imported
    torch.
    """
    local_rank, ranks = local_ranks(environment)
    max_ranks = memory_bytes(root) / (IMPORT_MB * 10**6)
    if ranks == 1 or ranks <= max_ranks:
        return
    if local_rank == 0:
        host, gb = socket.gethostname(), memory_bytes(root) / 10**9
        exits.print_error(
            BadInput(
                f"{host}: {ranks} ranks need {ranks * IMPORT_MB / 1000:.1f} GB of memory for their imports alone, and "
                f"the host has {gb:.1f} GB. Start at most {max(1, int(max_ranks))} ranks there."
            )
        )
    else:
        time.sleep(FIRST_ERROR_S)
    sys.exit(exits.BAD_INPUT)


def local_ranks(environment: Mapping[str, str]) -> tuple[int, int]:
    """Return this process's rank and the number of ranks on this host, according to its launcher; else 0 and 1."""
    for rank, size in _LOCAL:
        if size in environment:
            return int(environment.get(rank, "0")), int(environment[size])
    return int(environment.get("SLURM_LOCALID", "0")), len(environment.get("SLURM_GTIDS", "0").split(","))
