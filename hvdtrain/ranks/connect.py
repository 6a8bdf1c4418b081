"""How ranks join: over MPI, so that they can agree on settings and data; `comm.start()` then starts Horovod.

One process without a launcher gets SerialComm, which needs neither.
"""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from hvdtrain.ranks import cores
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm, HorovodComm, SerialComm
from hvdtrain.ranks.launchers import require_joined
from hvdtrain.safety import watchdog
from hvdtrain.safety.exits import NEWCOMER, RANK_VARIABLES, BadInput
from hvdtrain.safety.memory import keep_freed_memory

# Fusing buffer of Horovod's all-reduce, in MiB: see "Which reducer and bucket size?" in docs/explanation/benchmarks.md.
FUSION_THRESHOLD_MB = 128.0

# Names of sums that Horovod remembers; beyond them it negotiates each anew at every step, and v2_l with --sync-bn has
# 1,334, more than Horovod's own 1,024. More room is free: what ranks exchange is a bit for each name in use, and the
# room itself takes 8 bytes a name (response_cache.cc of Horovod 0.28.1).
CACHE_CAPACITY = 4096

# Horovod by itself would wait for ever: it ends a job whose ranks wait so much longer for one than the watchdog's fixed
# limits: 11 minutes, unless the settings' hang_timeout_s is more than a minute.
AFTER_WATCHDOG_S = 60


def connect(
    *,
    fusion_threshold_mb: float | None,
    cycle_time_ms: float | None,
    timeline: bool = False,
    hang_timeout_s: float | None = None,
    can_grow: bool = False,
) -> Comm:
    """Join the ranks that were launched together, or be alone; memory that is freed from now on is kept.

    Horovod's settings (MiB and ms; None leaves the environment's, and for the threshold else FUSION_THRESHOLD_MB)
    are put where Horovod will read them (threshold 0: each gradient is summed by itself, in the same order in every
    run). Ranks that fill their cores are made to yield while they wait. Unless the environment says otherwise, Horovod
    remembers CACHE_CAPACITY names, and a rank that does not come to a sum ends the job AFTER_WATCHDOG_S later than a
    watchdog with `hang_timeout_s` does. `timeline` says that `start` will be given a file for one; raises BadInput
    where there is no Horovod to write it, where another launcher has started processes that do not meet, and where
    ranks lack Horovod. Where the run `can_grow`, ranks can reach newcomers.
    """
    keep_freed_memory()  # before MPI and Horovod have threads
    if fusion_threshold_mb is not None:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(round(fusion_threshold_mb * 2**20))
    if os.environ.get("HOROVOD_AUTOTUNE") != "1":  # which leaves a threshold that is given as it is
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(round(FUSION_THRESHOLD_MB * 2**20)))
    if cycle_time_ms is not None:
        os.environ["HOROVOD_CYCLE_TIME"] = str(cycle_time_ms)
    os.environ.setdefault("HOROVOD_CACHE_CAPACITY", str(CACHE_CAPACITY))
    stall_s = max(watchdog.SLOW_S, watchdog.slow_limit_s(hang_timeout_s)) + AFTER_WATCHDOG_S
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(round(stall_s)))
    if timeline:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # the file's name comes with `start`

    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        comm: Comm = HorovodComm(mpi=None)
    elif any(name in os.environ for name in RANK_VARIABLES):
        local_size = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        if local_size >= cores.count_host_cores(local_size):
            # Open MPI spins as if each rank had a core to spare. It reads this at MPI_Init, which the import runs.
            os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if os.environ.get("OMPI_COMM_WORLD_SIZE") == str(local_size):
            _restrict_tcp(reach_newcomers=can_grow)
        if can_grow:
            os.environ.setdefault("OMPI_MCA_coll", "^han")  # it ends ranks by a signal once there are newcomers: 5.0.11
        from mpi4py import MPI

        comm = HorovodComm(MPI.COMM_WORLD)
        if NEWCOMER not in os.environ:  # that one has the Python of the rank that has started it
            if comm.size == 1:
                require_joined(os.environ)
            agree(comm, _require_horovod)
    else:
        require_joined(os.environ)
        if timeline:
            raise BadInput(
                "--timeline: only Horovod has one. Start with horovodrun or mpirun, or leave --timeline out."
            )
        return SerialComm()
    return comm


def _require_horovod() -> None:
    """Raise BadInput if Horovod is missing: hvdtrain's package cannot name it, since it needs a build of its own."""
    if find_spec("horovod") is None:
        python = sys.executable
        raise BadInput(
            f"{python}: Horovod is not installed, and ranks need it. Run `PYTHON={python} make wheels` in a clone of "
            f"hvdtrain, then `{python} -m pip install dist/horovod-*.whl`."
        )


def _restrict_tcp(*, reach_newcomers: bool) -> None:
    """Let Open MPI's TCP, which would listen on every address, do without them; newcomers have no other way."""
    if not reach_newcomers:
        os.environ["OMPI_MCA_btl"] = _exclude_tcp(os.environ.get("OMPI_MCA_btl", ""))
    elif NEWCOMER not in os.environ:  # that one has its network from who has invited it
        os.environ.setdefault("OMPI_MCA_btl_tcp_if_include", "lo")


def _exclude_tcp(transports: str) -> str:
    """Open MPI's transports for the ranks of one host: its TCP would listen on every address. A list of them stays."""
    if not transports:
        return "^tcp"
    return f"{transports},tcp" if transports.startswith("^") else transports


def start_newcomers(programs: Sequence[Sequence[str]], hosts: Sequence[str]) -> Any:
    """Start newcomers on these hosts, by words: MPI's communicator to them, once all of them have called `connect`.

    Raises MPI.Exception where they cannot be started.
    """
    from mpi4py import MPI

    infos = [MPI.Info.Create({"host": host}) for host in hosts]
    try:
        return MPI.COMM_SELF.Spawn_multiple(
            [words[0] for words in programs],
            [list(words[1:]) for words in programs],
            maxprocs=[1] * len(programs),
            info=infos,
        )
    finally:
        for info in infos:
            info.Free()


def parent_comm() -> Any:
    """MPI's communicator to the rank that has started this newcomer."""
    from mpi4py import MPI

    return MPI.Comm.Get_parent()


def open_port() -> str:
    """Where newcomers find the ranks that they join."""
    from mpi4py import MPI

    return MPI.Open_port()


def merge_ranks(mpi: Any, port: str, *, is_newcomer: bool) -> Any:
    """MPI's communicator of these ranks and of newcomers, who join at their port and have the last ranks then.

    All of both call it. MPI_Intercomm_create, by way of one rank, would leave the others without knowing who of the
    newcomers is on their host: then Horovod waits for ever in MPI_Comm_split_type (Open MPI 5.0.11).
    """
    intercomm = mpi.Connect(port) if is_newcomer else mpi.Accept(port)
    merged = intercomm.Merge(high=is_newcomer)
    intercomm.Free()
    return merged
