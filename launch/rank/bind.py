"""On each rank: bind to the planned GPU and cores, then become the program.

    mpirun ... python -m launch.rank.bind -- python -m hvdtrain.effnet ...

The plan comes in HVDLAUNCH_PLAN, the rank from mpirun, horovodrun or srun. Standard library only: this runs once per
rank on every host.
"""

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from typing import Any, NoReturn

RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "HOROVOD_RANK", "SLURM_PROCID")
LOCAL_RANKS = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "HOROVOD_LOCAL_RANK", "SLURM_LOCALID")
PR_SET_PDEATHSIG = 1  # from linux/prctl.h


def main(argv: list[str]) -> NoReturn:
    """Become the program after `--`."""
    die_with_parent()
    program = argv[argv.index("--") + 1 :] if "--" in argv else []
    if not program:
        refuse("usage: python -m launch.rank.bind -- PROGRAM [ARGUMENT]...")
    slot = own_slot(os.environ)
    for name, value in slot["environment"].items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ.setdefault("HOME", os.path.expanduser("~"))  # noqa: PTH111 (this host's, from its list of users)
    # What the ranks of this host share: a program between this one and the training, as nsys, is bound as well.
    os.environ["HVDLAUNCH_CORES"] = ",".join(map(str, sorted(os.sched_getaffinity(os.getppid()))))
    bind_to(slot["cores"])
    # Until the program has a handler of its own this signal, which asks it to save and leave, would kill it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    try:
        os.execvp(program[0], program)  # noqa: S606 (that is what this file is for)
    except OSError as error:
        refuse(f"rank {slot['rank']} on {slot['host']} cannot start {program[0]!r}: {error.strerror}")


def own_slot(environment: Any) -> dict[str, Any]:
    """This rank's place in the plan, checked against where the launcher has really put it."""
    try:
        rank = int(next(environment[name] for name in RANKS if name in environment))
        slot: dict[str, Any] = json.loads(environment["HVDLAUNCH_PLAN"])["ranks"][rank]
    except (StopIteration, KeyError, ValueError, IndexError, TypeError):
        refuse("this process has no place in HVDLAUNCH_PLAN: start it with hvdlaunch run")
    here = socket.gethostname()
    local_rank = next((int(environment[name]) for name in LOCAL_RANKS if name in environment), slot["local_rank"])
    if here != slot["hostname"] or local_rank != slot["local_rank"]:
        refuse(
            f"rank {rank} was planned as local rank {slot['local_rank']} on {slot['hostname']} but is local rank "
            f"{local_rank} on {here}: give every host its own name, once, in -H"
        )
    return slot


def bind_to(cores: str) -> None:
    """Run on these cores, as in 0-3,8, as far as this process may use them."""
    planned: set[int] = set()
    for part in filter(None, cores.split(",")):
        first, _, last = part.partition("-")
        planned |= set(range(int(first), int(last or first) + 1))
    allowed = os.sched_getaffinity(0) & planned
    if allowed:
        os.sched_setaffinity(0, allowed)


def die_with_parent() -> None:
    """Get SIGKILL when the launcher's process on this host ends; this survives exec."""
    parent = os.getppid()
    with contextlib.suppress(AttributeError):  # a C library without prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def refuse(message: str) -> NoReturn:
    """One line, and status 2."""
    print(f"hvdlaunch: {message}", file=sys.stderr, flush=True)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
