"""Numbers and words as a table shows them."""

import math
from collections.abc import Callable

MISSING = "-"
MAX_LETTERS = 24  # of a setting if there is little room


def format_digits(value: float) -> str:
    """The number with three significant digits, at most 12 decimals, and all digits before its point."""
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(12, max(0, 2 - magnitude))}f}"


def format_integer(value: float) -> str:
    """A count, or a mean of counts: without decimals if it has none."""
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"


def format_change(change: float, number_format: Callable[[float], str]) -> str:
    """A difference with its sign."""
    return f"{'-' if change < 0 else '+'}{number_format(abs(change))}"


def escape_line(text: str) -> str:
    """Escape untrusted text: line ends, characters that move the cursor, and halves of surrogate pairs."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in " ".join(text.split()))


def shorten(text: str) -> str:
    """A long text without its beginning, because the ends of paths differ."""
    return text if len(text) <= MAX_LETTERS else f"…{text[1 - MAX_LETTERS :]}"
