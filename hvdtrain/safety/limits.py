"""Limits that this process's control groups, version 1 or 2, set on CPU time and memory."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def cpu_quota(root: Path) -> float:
    """Return the CPU time that the control groups allow, in cores; infinite without a limit."""
    limits = [math.inf]
    for folder in _folders(root, "cpu"):
        texts = [_read_text(folder / name) for name in ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")]
        match " ".join(texts).split():  # for example 150000 100000, in either version; max or -1 means no limit
            case [quota, period] if quota.isdecimal() and period.isdecimal() and int(period):
                limits.append(int(quota) / int(period))
    return min(limits)


def memory_bytes(root: Path) -> float:
    """Return the memory of the host, or the control groups' limit, including used memory; infinite if unknown."""
    lines = _read_text(root / "proc/meminfo").splitlines()
    total = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    files = ("memory.max", "memory.limit_in_bytes")  # of version 2 and version 1; max means no limit
    limits = [_read_text(folder / file).strip() for folder in _folders(root, "memory") for file in files]
    return min([math.inf, *total, *(int(text) for text in limits if text.isdecimal())])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of the groups that limit this process by a controller, innermost first."""
    for line in _read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):  # a container sees its own group as the root
            yield mount / str(group).lstrip("/")


def _read_text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
