"""The limits that the control groups of this process, of either version, set: time of cores, and memory."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path) -> float:
    """The time that the control groups allow, in cores; infinite without a limit."""
    limits = [math.inf]
    for folder in _folders(root, "cpu"):
        texts = [_read_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
        match " ".join(texts).split():  # such as 150000 100000, of one version or the other; max or -1 is no limit
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                limits.append(int(quota) / int(period))
    return min(limits)


def memory_bytes(root: Path) -> float:
    """The memory of the host, or what the control groups allow of it, free or not; infinite if unknown."""
    lines = _read_text(root / "proc/meminfo").splitlines()
    total = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    files = ("memory.max", "memory.limit_in_bytes")  # of one version and the other; max is no limit
    limits = [_read_text(folder / file).strip() for folder in _folders(root, "memory") for file in files]
    return min([math.inf, *total, *(int(text) for text in limits if text.isdecimal())])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that limit this process by a controller, from the innermost."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):  # a container sees its own as the root
            yield mount / str(group).lstrip("/")


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
