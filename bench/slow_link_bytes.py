"""One rank of two hosts: what a host sends for the sum of 16 MB over all ranks, flat and in two levels.

    mpirun -np 16 python bench/slow_link_bytes.py OUT

Without torch, so that 16 ranks fit on one machine. OUT gets the MB that a host has sent, by way.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

HOSTS = 2
NUMBERS = 4_000_080  # can be divided by any number of ranks here
SENT = Path("/sys/class/net/eth0/statistics/tx_bytes")


def main() -> None:
    world = MPI.COMM_WORLD
    per_host = world.size // HOSTS
    host, place = divmod(world.rank, per_host)
    inside, across = world.Split(host), world.Split(place)
    dealt = world.Split(0, key=place * HOSTS + host)  # as mpirun --map-by node numbers them
    values = np.ones(NUMBERS, dtype=np.float32)
    part = np.empty(NUMBERS // per_host, dtype=np.float32)

    def flat(comm: Any) -> None:
        comm.Allreduce(MPI.IN_PLACE, values)

    def two_level() -> None:
        inside.Reduce_scatter_block(values, part)
        across.Allreduce(MPI.IN_PLACE, part)
        inside.Allgather(part, values)

    ways: dict[str, Callable[[], None]] = {
        "flat": lambda: flat(world),
        "flat, ranks dealt out in turns": lambda: flat(dealt),
        "two-level": two_level,
    }
    found = {name: sent_mb(world, way) for name, way in ways.items()}
    if world.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))


def sent_mb(world: Any, way: Callable[[], None]) -> float:
    """By the host that sends more, for one sum; the first one makes the connections."""
    way()
    world.Barrier()
    before = int(SENT.read_text())
    world.Barrier()
    way()
    world.Barrier()
    return float(max(world.allgather(int(SENT.read_text()) - before)) / 1e6)


if __name__ == "__main__":
    main()
