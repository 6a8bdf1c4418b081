"""Lists of numbers in the kernel's notation: 0-3,8."""

import re
from collections.abc import Iterable

from launch.errors import TopologyError

MAX_CORES = 1 << 16

_RANGE = re.compile(r"([0-9]{1,9})(?:-([0-9]{1,9}))?")


def core_list(cores: Iterable[int]) -> str:
    """Format cores as `0-3,8`, sorted and without duplicates."""
    runs = runs_of(sorted(set(cores)))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def runs_of(cores: Iterable[int]) -> list[list[int]]:
    """Group the cores into runs of consecutive numbers."""
    runs: list[list[int]] = []
    for core in cores:
        if runs and runs[-1][-1] == core - 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return runs


def parse_range(text: str) -> tuple[str, str] | None:
    """Return both ends of `8-11` as strings; twice the same string for `8`, None for anything else."""
    match = _RANGE.fullmatch(text)
    return (match[1], match[2] or match[1]) if match and int(match[1]) <= int(match[2] or match[1]) else None


def parse_numbers(text: str) -> list[int] | None:
    """Return the numbers of `8,0-3` in the given order; None if the list is malformed or too long."""
    numbers: list[int] = []
    for part in text.split(","):
        ends = parse_range(part)
        if ends is None or int(ends[1]) >= MAX_CORES or len(numbers) >= MAX_CORES:
            return None
        numbers += range(int(ends[0]), int(ends[1]) + 1)
    return numbers


def parse_cores(text: str) -> tuple[int, ...]:
    """Return the sorted numbers of a list such as `0-3,8`, the notation of the kernel and nvidia-smi.

    Raises TopologyError if the list is malformed or has a number over 65535.
    """
    numbers = parse_numbers(text.strip())
    if numbers is None:
        raise TopologyError(f"{text!r} is not a list of numbers; expected one such as 0-3,8")
    return tuple(sorted(set(numbers)))
