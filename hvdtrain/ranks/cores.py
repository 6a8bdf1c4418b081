"""The cores that the ranks of a host have between them: where they may run, and the time that a quota leaves."""

import math
import os
from pathlib import Path

from hvdtrain.safety.limits import cpu_quota

ROOT = Path("/")


def count_host_cores(local_size: int) -> int:
    """How many cores the `local_size` ranks of this host may use between them.

    A rank sees its own cores and the launcher's, which is not bound: ranks that were bound one by one have together as
    many as they are, ranks that were not share what the launcher may use. The launcher is the parent, unless hvdlaunch
    has told its cores. No more count than the quota of their control group pays for, as in a container with --cpus.
    """
    rank_cores = os.sched_getaffinity(0)
    host_cores = os.environ.get("HVDLAUNCH_CORES")
    launcher_cores = set(map(int, host_cores.split(","))) if host_cores else os.sched_getaffinity(os.getppid())
    return max(1, math.floor(min(len(rank_cores) * local_size, len(rank_cores | launcher_cores), cpu_quota(ROOT))))
