"""Lists of numbers as the kernel writes them: 0-3,8."""

import re
from collections.abc import Iterable

from launch.errors import TopologyError

MAX_CORES = 1 << 16


def core_list(cores: Iterable[int]) -> str:
    """The cores as `0-3,8`, each once and in order."""
    runs = runs_of(sorted(set(cores)))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def runs_of(cores: Iterable[int]) -> list[list[int]]:
    """The cores in runs of consecutive numbers."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return runs


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `0-3,8`, sorted, as the kernel and nvidia-smi write cores and NUMA nodes.

    Raises:
        TopologyError: not such a list, or a number over 65535.
    """
    numbers: set[int] = set()
    for part in text.strip().split(","):
        match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < MAX_CORES:
            raise TopologyError(f"{text!r} is not a list of numbers; expected one such as 0-3,8")
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))
