"""Lists of numbers as the kernel writes them: 0-3,8."""

import re
from collections.abc import Iterable

from launch.errors import TopologyError

MAX_CORES = 1 << 16

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


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


def parse_range(text: str) -> tuple[str, str] | None:
    """Both ends of `8-11`, as they are written; twice the same for `8`, None for anything else."""
    match = _RANGE.fullmatch(text)
    return (match[1], match[2] or match[1]) if match and int(match[1]) <= int(match[2] or match[1]) else None


def parse_numbers(text: str) -> list[int] | None:
    """The numbers of `8,0-3` in the order given; None if it is no such list, or too long a one."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = parse_range(part)
        if ends is None or int(ends[1]) >= MAX_CORES or len(numbers) >= MAX_CORES:
            return None
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers


def parse_cores(text: str) -> tuple[int, ...]:
    """The numbers of a list such as `0-3,8`, sorted, as the kernel and nvidia-smi write cores and NUMA nodes.

    Raises:
        TopologyError: not such a list, or a number over 65535.
    """
    numbers = parse_numbers(text.strip())
    if numbers is None:
        raise TopologyError(f"{text!r} is not a list of numbers; expected one such as 0-3,8")
    return tuple(sorted(set(numbers)))
