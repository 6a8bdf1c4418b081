"""The cores that the ranks of a host have between them: where they may run, and the time that a quota leaves."""

import math
import os
from pathlib import Path, PurePosixPath

ROOT = Path("/")


def cores_together(local_size: int) -> int:
    """How many cores the `local_size` ranks of this host may use between them.

    A rank sees its own cores and the launcher's, which is not bound: ranks that were bound one by one have together as
    many as they are, ranks that were not share what the launcher may use. The launcher is the parent, unless hvdlaunch
    has told its cores. No more count than the quota of their control group pays for, as in a container with --cpus.
    """
    own = os.sched_getaffinity(0)
    told = os.environ.get("HVDLAUNCH_CORES")
    launcher = set(map(int, told.split(","))) if told else os.sched_getaffinity(os.getppid())
    return max(1, math.floor(min(len(own) * local_size, len(own | launcher), quota(ROOT))))


def quota(root: Path) -> float:
    """The time that this process's control groups of either version allow, in cores; infinite without a limit."""
    allowed = [math.inf]
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):  # a container sees its own as the root
            folder = mount / str(group).lstrip("/")
            words = [_text(folder / "cpu.max"), _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
            words = " ".join(words).split()  # as 150000 100000, of one version or the other; max or -1 is no limit
            if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
                allowed.append(int(words[0]) / int(words[1]))
    return min(allowed)


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
