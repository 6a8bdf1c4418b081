"""Pure: what runs on each rank, and the hosts of ranks."""

from collections import Counter
from collections.abc import Iterable, Sequence

from launch.hosts.host import Host
from launch.placement.slots import RankSlot


def hosts_of(slots: Iterable[RankSlot]) -> tuple[Host, ...]:
    """Return the hosts that have ranks, with their numbers of slots."""
    return tuple(Host(name=name, slots=ranks) for name, ranks in Counter(slot.host for slot in slots).items())


def under_nsys(program: Sequence[str], rank_variable: str) -> tuple[str, ...]:
    """Run the program under Nsight Systems, with a report per rank: GPU, ranges, waits and MPI, no CPU samples.

    The reports are relative to the run's working folder, on each host.
    """
    return (
        "nsys",
        "profile",
        "--trace=cuda,nvtx,osrt,mpi",
        "--mpi-impl=openmpi",
        "--sample=none",
        "--cpuctxsw=none",
        f"--output=%q{{HVDLAUNCH_JOB}}-rank-%q{{{rank_variable}}}",
        "--force-overwrite=true",
        *program,
    )


def in_apptainer(program: Sequence[str], image: str) -> tuple[str, ...]:
    """Run the program in an Apptainer image, with the host's GPU driver."""
    return ("apptainer", "exec", "--nv", image, *program)
