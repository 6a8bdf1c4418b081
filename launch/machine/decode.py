"""JSON that launch.documents has parsed -> a dataclass: fields of their types, no text that could harm a terminal."""

import dataclasses
import types
import typing
from functools import cache

from launch.errors import TopologyError, harmless

MAX_CHARACTERS = 256  # of one text
MAX_WHOLE_FLOAT = 1 << 16  # JSON may write 40.0 as 40
# Missing in older files: they have defaults.
LATER = frozenset(
    {"speed_mbps", "mtu", "p2p", "shared", "drawbacks", "ports", "rate_gbps", "cpu_quota", "measured"}
    | {"disks", "pcie", "file_system"}
)


def decode(value: object, kind: typing.Any, where: str) -> typing.Any:
    """Convert the value to a dataclass, a tuple of any length, str, int, float or bool, or one of these or None.

    Long texts are truncated, unprintable characters are escaped. TopologyError names the place, starting with `where`,
    and the expected type.
    """
    options = typing.get_args(kind) if isinstance(kind, types.UnionType) else (kind,)
    if value is None and types.NoneType in options:
        return None
    wanted = next(option for option in options if option is not types.NoneType)
    if dataclasses.is_dataclass(wanted):
        record: typing.Any = wanted
        hints = _hints(record)
        if not isinstance(value, dict) or not set(hints) - LATER <= set(value) <= set(hints):
            raise TopologyError(f"{where}: expected an object with {', '.join(hints)}, found {short(value)}")
        fields = {field: decode(value[field], hints[field], f"{where}.{field}") for field in hints if field in value}
        return record(**fields)
    if typing.get_origin(wanted) is tuple:
        if not isinstance(value, list):
            raise TopologyError(f"{where}: expected a list, found {short(value)}")
        inner = typing.get_args(wanted)[0]
        if inner is int and all(type(item) is int for item in value):  # fast path: a host has a thousand of them
            return tuple(value)
        return tuple(decode(item, inner, f"{where}[{i}]") for i, item in enumerate(value))
    if wanted is float and type(value) is int and abs(value) < MAX_WHOLE_FLOAT:
        value = float(value)
    if type(value) is not wanted:
        names = " or ".join("null" if option is types.NoneType else option.__name__ for option in options)
        raise TopologyError(f"{where}: expected {names}, found {short(value)}")
    if not isinstance(value, str):
        return value
    text = harmless(value)
    return text if len(text) <= MAX_CHARACTERS else f"{text[: MAX_CHARACTERS - 3]}..."


@cache
def _hints(record: typing.Any) -> dict[str, typing.Any]:
    return typing.get_type_hints(record)


def short(value: object) -> str:
    """Format a value for one line of an error: the fields of an object, or Python's repr."""
    text = harmless(", ".join(value)) or "none" if isinstance(value, dict) else ascii(value)
    return text if len(text) < 80 else f"{text[:77]}..."
