"""Connects the ranks over MPI, so that they can agree on settings and data before `comm.start()` starts Horovod.

A single process without a launcher gets SerialComm, which needs neither MPI nor Horovod.
"""

import os
import sys
from importlib.util import find_spec

from hvdtrain.ranks import cores
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm, HorovodComm, SerialComm
from hvdtrain.ranks.launchers import require_joined
from hvdtrain.settings.safety import watchdog
from hvdtrain.settings.safety.exits import RANK_VARIABLES, BadInput
from hvdtrain.settings.safety.memory import keep_freed_memory

# Size of Horovod's fusion buffer, in MiB: see "Which reducer and bucket size?" in docs/explanation/benchmarks.md.
FUSION_THRESHOLD_MB = 128.0

# Number of tensor names that Horovod caches. It negotiates names beyond this at every step, and v2_l with --sync-bn has
# 1,334, more than Horovod's default of 1,024. A larger cache is nearly free: ranks exchange one bit per name in use,
# and an unused entry takes 8 bytes (response_cache.cc of Horovod 0.28.1).
CACHE_CAPACITY = 4096

# Horovod by default waits forever. It ends a job whose ranks wait for one this much longer than the watchdog's fixed
# limits: 11 minutes, unless the setting hang_timeout_s is more than a minute.
AFTER_WATCHDOG_S = 60


def connect(
    *,
    fusion_threshold_mb: float | None,
    cycle_time_ms: float | None,
    timeline: bool = False,
    hang_timeout_s: float | None = None,
) -> Comm:
    """Connect the ranks that were launched together; from now on freed memory is kept for reuse.

    Horovod reads its settings (MiB and ms) from the environment, where this function puts them. None keeps the
    environment's value; the threshold defaults to FUSION_THRESHOLD_MB. With threshold 0 each gradient is summed alone,
    in the same order in every run. Ranks that occupy all cores yield while they wait. Unless the environment sets other
    values, Horovod caches CACHE_CAPACITY names, and a rank that misses a sum ends the job AFTER_WATCHDOG_S later than a
    watchdog with `hang_timeout_s` does. `timeline`: `start` will be passed a file for a timeline.

    Raise BadInput if there is no Horovod to write the timeline, if another launcher has started processes that are not
    connected, or if ranks lack Horovod.
    """
    keep_freed_memory()  # before MPI and Horovod have threads
    if fusion_threshold_mb is not None:
        os.environ["HOROVOD_FUSION_THRESHOLD"] = str(round(fusion_threshold_mb * 2**20))
    if os.environ.get("HOROVOD_AUTOTUNE") != "1":  # autotune does not change a given threshold
        os.environ.setdefault("HOROVOD_FUSION_THRESHOLD", str(round(FUSION_THRESHOLD_MB * 2**20)))
    if cycle_time_ms is not None:
        os.environ["HOROVOD_CYCLE_TIME"] = str(cycle_time_ms)
    os.environ.setdefault("HOROVOD_CACHE_CAPACITY", str(CACHE_CAPACITY))
    stall_s = max(watchdog.SLOW_S, watchdog.slow_limit_s(hang_timeout_s)) + AFTER_WATCHDOG_S
    os.environ.setdefault("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", str(round(stall_s)))
    if timeline:
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"  # `start` sets the file name

    if "HOROVOD_GLOO_RENDEZVOUS_ADDR" in os.environ:
        return HorovodComm(mpi=None)
    if any(name in os.environ for name in RANK_VARIABLES):
        local_size = int(os.environ.get("OMPI_COMM_WORLD_LOCAL_SIZE", "1"))
        if local_size >= cores.count_host_cores(local_size):
            # By default Open MPI busy-waits as if each rank had a spare core. It reads this variable at MPI_Init, which
            # the import runs.
            os.environ["OMPI_MCA_mpi_yield_when_idle"] = "1"
        if os.environ.get("OMPI_COMM_WORLD_SIZE") == str(local_size):
            os.environ["OMPI_MCA_btl"] = _exclude_tcp(os.environ.get("OMPI_MCA_btl", ""))
        from mpi4py import MPI

        comm = HorovodComm(MPI.COMM_WORLD)
        if comm.size == 1:
            require_joined(os.environ)
        agree(comm, _require_horovod)
        return comm
    require_joined(os.environ)
    if timeline:
        raise BadInput("--profile timeline: only Horovod has one. Start with horovodrun or mpirun, or leave it out.")
    return SerialComm()


def _require_horovod() -> None:
    """Raise BadInput if Horovod is missing: it is not a dependency of the package, since it needs a special build."""
    if find_spec("horovod") is None:
        python = sys.executable
        raise BadInput(
            f"{python}: Horovod is not installed, and ranks need it. Run `PYTHON={python} TORCH=here make wheels` "
            f"in a clone of hvdtrain, then `{python} -m pip install dist/*.whl`."
        )


def _exclude_tcp(transports: str) -> str:
    """Exclude TCP, which would listen on every address of a single host. A list of transports to use is not changed."""
    if not transports:
        return "^tcp"
    return f"{transports},tcp" if transports.startswith("^") else transports
