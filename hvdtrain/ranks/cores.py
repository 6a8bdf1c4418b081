"""The cores that the ranks of a host share, limited by their affinity and by a CPU quota."""

import contextlib
import math
import os
from pathlib import Path

from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety.errors import BadInput
from hvdtrain.settings.safety.limits import cpu_quota

ROOT = Path("/")


def count_host_cores(local_size: int) -> int:
    """Return the number of cores that the `local_size` ranks of this host may use together.

    A rank sees its own cores and those of its launcher, which is not bound. Ranks bound to one core each have as many
    cores as ranks; ranks that are not bound share the launcher's cores. The launcher is the parent process, unless
    hvdlaunch has passed its cores. The CPU quota of the control group, for example of a container with --cpus, is an
    upper limit.
    """
    rank_cores = os.sched_getaffinity(0)
    launcher_cores = set[int]()
    with contextlib.suppress(BadInput):  # the command line reports it
        launcher_cores |= {*fact(os.environ, "cores", list[int]())}
    launcher_cores = launcher_cores or os.sched_getaffinity(os.getppid())
    return max(1, math.floor(min(len(rank_cores) * local_size, len(rank_cores | launcher_cores), cpu_quota(ROOT))))
