"""The windows of a start: lines that its first rank writes to the file that HVDLAUNCH_WINDOWS names.

    {"samples": 512, "seconds": 0.31}

Optional fields: "shares", the shares of a step so far by the target of remedies, "losses", that of each step of the
window, and "epoch_samples". Time between windows, for example for an evaluation, is not measured.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from launch.documents import Document, parse
from launch.errors import harmless
from launch.files import read_text

WARM_UP = 2  # windows at the start that are not counted
COUNTED = 10  # counted windows of a start
LEAST, MOST = 1e-9, 1e15  # samples and seconds of a window
FEWEST = 3  # counted windows of a start that is ended because it is slow
MOST_LOSSES = 1000  # of a start that are kept


@dataclass(frozen=True, kw_only=True)
class WindowReader:
    """The windows that a start has written so far."""

    rates: tuple[float, ...] = ()  # samples per second, without the warm-up
    shares: Mapping[str, float] = field(default_factory=dict)  # of a step, in the last window that has them
    epoch_samples: float | None = None
    losses: tuple[float, ...] = ()  # of the first steps

    @property
    def are_enough(self) -> bool:
        return len(self.rates) >= COUNTED


def read_windows(file: Path) -> WindowReader:
    """Read the windows; ValueError names an invalid line. An incomplete last line is ignored."""
    try:
        text = read_text(file)
    except FileNotFoundError:
        return WindowReader()
    except OSError as error:
        raise ValueError(f"the file of its windows cannot be read: {error.strerror}") from error
    lines = [line for line in text.rpartition("\n")[0].splitlines() if line.strip()]
    rates: list[float] = []
    losses: list[float] = []
    shares: dict[str, float] = {}
    epoch_samples: float | None = None
    for number, line in enumerate(lines, start=1):
        try:
            window = Document(parse(line))
            rates.append(window.number("samples", LEAST, MOST) / window.number("seconds", LEAST, MOST))
            shares = shares_of(window) if "shares" in window.values else shares
            epoch_samples = window.optional_number("epoch_samples", LEAST, MOST) or epoch_samples
            losses += losses_of(window)
        except ValueError as error:
            raise ValueError(f"line {number} of its windows is not one: {line[:80]!r} ({error})") from error
    return WindowReader(
        rates=tuple(rates[WARM_UP : WARM_UP + COUNTED]),
        shares=shares,
        epoch_samples=epoch_samples,
        losses=tuple(losses[:MOST_LOSSES]),
    )


def shares_of(document: Document) -> dict[str, float]:
    """Return the shares of a step by their names; ValueError if one is not from 0 to 1."""
    shares = document.within("shares")
    return {harmless(name): shares.number(name, 0, 1) for name in shares.values}


def losses_of(document: Document) -> tuple[float, ...]:
    """Return the losses; ValueError if one is not a number of usual size."""
    return document.numbers("losses", -MOST, MOST) if "losses" in document.values else ()
