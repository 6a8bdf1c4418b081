"""The windows of a start: lines that its first rank writes to the file that HVDLAUNCH_WINDOWS names.

    {"samples": 512, "seconds": 0.31}

Optional fields: "shares", the shares of a step so far by the target of remedies, and "epoch_samples". Time between
windows, for example for an evaluation, is not measured.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from launch.files import read_text

WARM_UP = 2  # windows at the start that are not counted
COUNTED = 10  # counted windows of a start: two starts have 20
FEWEST = 3  # counted windows of a start that is ended because it is slow


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The windows that a start has written so far."""

    rates: tuple[float, ...] = ()  # samples per second, without the warm-up
    shares: Mapping[str, float] = field(default_factory=dict)  # of a step, in the last window that has them
    epoch_samples: float | None = None

    @property
    def are_enough(self) -> bool:
        return len(self.rates) >= COUNTED


def read_windows(file: Path) -> Windows:
    """Read the windows; ValueError names an invalid line. An incomplete last line is ignored."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return Windows()
    except OSError as error:
        raise ValueError(f"the file of its windows cannot be read: {error.strerror}") from error
    lines = [line for line in text.rpartition("\n")[0].splitlines() if line.strip()]
    rates, shares, epoch_samples = [], {}, None
    for number, line in enumerate(lines, start=1):
        try:
            window = json.loads(line)
            rates.append(_positive(window["samples"]) / _positive(window["seconds"]))
            if "shares" in window:
                shares = {str(name): _share(value) for name, value in window["shares"].items()}
            if "epoch_samples" in window:
                epoch_samples = _positive(window["epoch_samples"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"line {number} of its windows is not one: {line[:80]!r} ({error!r})") from error
    counted = tuple(rates[WARM_UP : WARM_UP + COUNTED])
    return Windows(rates=counted, shares=shares, epoch_samples=epoch_samples)


def _positive(value: Any) -> float:
    number = float(value)
    if isinstance(value, bool) or not 0 < number < math.inf:
        raise ValueError(f"{value!r} is not above 0")
    return number


def _share(value: Any) -> float:
    number = float(value)
    if not 0 <= number <= 1:
        raise ValueError(f"a share of {value!r} is not from 0 to 1")
    return number
