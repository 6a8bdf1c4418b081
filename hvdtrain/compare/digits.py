"""Numbers as text, with as many digits as a reader needs."""

import math


def format_three_digits(value: float) -> str:
    """The number with three significant digits, at most four decimals, and all digits before its point."""
    return format_digits(value, most=4)


def format_digits(value: float, *, most: int = 12) -> str:
    """The number with three significant digits, at most `most` decimals, and all digits before its point."""
    magnitude = math.floor(math.log10(abs(value))) if value else 0
    return f"{value:.{min(most, max(0, 2 - magnitude))}f}"


def format_integer(value: float) -> str:
    """A count, or a mean of counts: without decimals if it has none."""
    return f"{value:.0f}" if value == round(value) else f"{value:.1f}"
