"""What the control groups of this process, of either version, leave of its host: time of cores, and memory."""

import math
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def quota(root: Path) -> float:
    """The time that its groups allow, in cores; infinite without a limit."""
    allowed = [math.inf]
    for folder in _folders(root, "cpu"):
        words = [_text(folder / "cpu.max"), _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")]
        words = " ".join(words).split()  # as 150000 100000, of one version or the other; max or -1 is no limit
        if len(words) == 2 and all(map(str.isdecimal, words)) and int(words[1]):
            allowed.append(int(words[0]) / int(words[1]))
    return min(allowed)


def memory_bytes(root: Path) -> float:
    """The memory of the host, or what its groups allow of it, whoever uses it now; infinite where not known."""
    lines = _text(root / "proc/meminfo").splitlines()
    total = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemTotal:")]
    files = ("memory.max", "memory.limit_in_bytes")  # of one version and the other; max is no limit
    allowed = [_text(folder / file).strip() for folder in _folders(root, "memory") for file in files]
    return min([math.inf, *total, *(int(text) for text in allowed if text.isdecimal())])


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """The folders of the groups that limit this process by a controller, from the innermost."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        for group in (PurePosixPath(path), *PurePosixPath(path).parents):  # a container sees its own as the root
            yield mount / str(group).lstrip("/")


def _text(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""
