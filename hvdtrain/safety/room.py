"""Checks that the ranks of a host fit into its memory, before each of them imports torch."""

import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from hvdtrain.safety import exits
from hvdtrain.safety.exits import FIRST_ERROR_S, BadInput
from hvdtrain.safety.limits import memory_bytes

# Unshared memory of a rank that has imported torch and this package: 279 to 366 MB measured on Linux.
IMPORT_MB = 350
# Local rank and number of local ranks: Open MPI, Horovod's Gloo, MPICH and Intel MPI.
_LOCAL = (
    ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ("HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE"),
    ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
)


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
