"""JSON that other programs have written: every number is finite and in range, every value of its type."""

import json
import math
from collections.abc import Mapping
from typing import Any, NoReturn

MOST = 1 << 63  # no count of bytes, samples or steps is above it
MAX_CHARACTERS = 4096  # of one text


def parse(text: str) -> Any:
    """Parse JSON; ValueError if it is malformed, nested too deeply, or has a number that is infinite or above MOST."""
    try:
        return json.loads(text, parse_int=_whole, parse_float=_real, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def _whole(digits: str) -> int:
    number = int(digits) if len(digits) <= len(str(MOST)) else MOST
    return number if abs(number) < MOST else _refuse(digits)


def _real(digits: str) -> float:
    number = float(digits)
    return number if math.isfinite(number) else _refuse(digits)


def _refuse(word: str) -> NoReturn:
    raise ValueError(f"{word if len(word) < 40 else f'{word[:37]}...'} is not a number that JSON can hold")


class Document:
    """An object of a document, whose values are checked where they are read; ValueError names the key.

    A value that is missing or null is None where it is `optional`, else an error.
    """

    def __init__(self, values: object, name: str = "") -> None:
        """Raise ValueError if the values are not an object; `name` precedes the keys in messages."""
        if not isinstance(values, dict):
            raise ValueError(f"{name or 'it'} is {_short(values)}, not an object")
        self.values: Mapping[str, Any] = values
        self._prefix = f"{name}." if name else ""

    def number(self, key: str, least: float, most: float) -> float:
        """Return a number from `least` to `most`."""
        value = self._of(key, (int, float), "a number")
        if not least <= value <= most:
            raise ValueError(f"{self._prefix}{key} is {_short(value)}, not from {least:g} to {most:g}")
        return float(value)

    def optional_number(self, key: str, least: float, most: float) -> float | None:
        """Return a number from `least` to `most`; None if it is missing or null."""
        return None if self.values.get(key) is None else self.number(key, least, most)

    def whole(self, key: str, least: int, most: int = MOST) -> int:
        """Return a whole number from `least` to `most`."""
        self._of(key, (int,), "a whole number")
        self.number(key, least, most)
        return int(self.values[key])

    def text(self, key: str) -> str:
        """Return a text, which may have unprintable characters."""
        text = str(self._of(key, (str,), "a text"))
        if len(text) > MAX_CHARACTERS:
            raise ValueError(f"{self._prefix}{key} has more than {MAX_CHARACTERS} characters")
        return text

    def optional_text(self, key: str) -> str | None:
        """Return a text; None if it is missing or null."""
        return None if self.values.get(key) is None else self.text(key)

    def list(self, key: str) -> list[Any]:
        """Return a list."""
        return list(self._of(key, (list,), "a list"))

    def numbers(self, key: str, least: float, most: float) -> tuple[float, ...]:
        """Return a list of numbers from `least` to `most`."""
        items = {f"{key}[{place}]": value for place, value in enumerate(self.list(key))}
        checked = Document(items, self._prefix.rstrip("."))
        return tuple(checked.number(name, least, most) for name in items)

    def within(self, key: str) -> "Document":
        """Return an object in this one."""
        return Document(self.values.get(key), f"{self._prefix}{key}")

    def _of(self, key: str, kinds: tuple[type, ...], noun: str) -> Any:
        value = self.values.get(key)
        if type(value) not in kinds:
            raise ValueError(f"{self._prefix}{key} is {_short(value)}, not {noun}")
        return value


def _short(value: object) -> str:
    text = "missing" if value is None else ascii(value)
    return text if len(text) < 80 else f"{text[:77]}..."
