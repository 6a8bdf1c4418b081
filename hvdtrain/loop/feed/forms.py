"""The forms in which a program passes samples. N samples of a batch, S of a split.

| form | names of the batch |
|---|---|
| a mapping, a namedtuple, a dataclass, a table with named columns (pandas, polars) | its own |
| a tuple, or a list of other things than numbers | inputs, targets |
| anything else | inputs |

It holds for a sample and for a whole split in columns, whose values are tensors, arrays or lists with samples first.
Texts, bytes and mappings of a sample are not stacked: a batch has them as a list.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from numbers import Number
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import TensorDataset, default_collate, get_worker_info

from hvdtrain.core.task import Batch

UNNAMED = ("inputs", "targets")
_NOT_STACKED = (str, bytes, Mapping)


class SampleError(ValueError):
    """Samples that cannot be a batch of tensors; the message is one line with the remedy."""


def fields(values: Any) -> Mapping[str, Any]:
    """Return the values of a sample, or the columns of a split, by name; SampleError if names are missing."""
    if type(values) is dict or isinstance(values, Mapping):
        return values
    if dataclasses.is_dataclass(values):
        return {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    if hasattr(values, "_asdict"):  # a namedtuple
        return dict(values._asdict())
    if hasattr(values, "columns") and hasattr(values, "__array__"):
        return {str(name): values[name] for name in values.columns}
    if isinstance(values, tuple) or (isinstance(values, list) and not all(isinstance(one, Number) for one in values)):
        if len(values) > len(UNNAMED):
            raise SampleError(
                f"a sample of {len(values)} values without names: only inputs and targets can do without. Use a dict "
                "or a namedtuple."
            )
        return dict(zip(UNNAMED, values, strict=False))
    return {UNNAMED[0]: values}


def columns(data: Any) -> Mapping[str, Any] | None:
    """Return the columns of a split, if the data are columns and not samples."""
    if isinstance(data, TensorDataset):
        return fields(data.tensors)
    if isinstance(data, list | tuple) and not hasattr(data, "_asdict"):
        is_samples = not all(map(_is_column, data)) or (isinstance(data, list) and len(data) > len(UNNAMED))
        return None if is_samples else fields(tuple(data))
    is_indexed = hasattr(data, "__getitem__") and hasattr(data, "__len__")
    has_names = isinstance(data, Mapping) or hasattr(data, "_asdict") or hasattr(data, "__array__")
    return fields(data) if has_names or (dataclasses.is_dataclass(data) and not is_indexed) else None


def _is_column(values: Any) -> bool:
    return isinstance(values, list) or hasattr(values, "__array__")  # a tensor has it too


def are_several(data: Any) -> bool:
    """Return whether the data are splits by name, and not columns."""
    values = data.values() if isinstance(data, Mapping) else ()
    return bool(values) and not any(
        isinstance(one, Sequence) or (hasattr(one, "__array__") and not hasattr(one, "columns")) for one in values
    )


def as_tensor(name: str, values: Any) -> Tensor:
    """Convert a column with samples first; SampleError if its values are not numbers of one shape."""
    if isinstance(values, Mapping):
        raise SampleError(f"{name!r} has names of its own. Give each of its columns a name beside the others.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nor is it written
            tensor = _converted(values)
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_numbers(name, values, error) from error
    if not tensor.dim():
        raise SampleError(f"{name!r} is a scalar: samples come first. Pass a tensor with at least one dimension.")
    return tensor


def _converted(values: Any) -> Tensor:
    if isinstance(values, Tensor):
        return values
    if hasattr(values, "__array__"):
        array = np.asarray(values)
        if array.dtype != object:
            return torch.as_tensor(np.asarray(array, array.dtype.newbyteorder("="), order="C"))
        values = array.tolist()
    if len(values) and hasattr(values[0], "__array__"):
        return torch.stack([_converted(value) for value in values])
    return torch.as_tensor(values)


def collate(samples: Sequence[Any]) -> Batch:
    """Collate samples into a batch, by name; empty if there are none. SampleError if values differ in shape or kind."""
    if not samples:
        return {}
    rows = list(map(fields, samples))
    for row in rows:
        if row.keys() != rows[0].keys():
            found = " and ".join(", ".join(map(repr, one)) for one in (rows[0], row))
            raise SampleError(f"samples have different names: {found}. Give all samples the same.")
    return {name: _stacked(name, [row[name] for row in rows]) for name in rows[0]}


def _stacked(name: str, values: list[Any]) -> Any:
    if isinstance(values[0], _NOT_STACKED) and all(isinstance(value, _NOT_STACKED) for value in values):
        return values
    try:
        if isinstance(values[0], Tensor) and get_worker_info() is None:
            return torch.stack(values)
        if isinstance(values[0], (list, tuple)):
            values = [torch.as_tensor(value) for value in values]
        batch = default_collate(values)  # in a reader process into memory that it shares with the rank
    except (TypeError, ValueError, RuntimeError) as error:
        raise _not_numbers(name, values, error) from error
    if not isinstance(batch, Tensor):
        raise _not_numbers(name, values)
    return batch


def _not_numbers(name: str, values: Any, error: Exception | None = None) -> SampleError:
    flat = np.asarray(values).flat if hasattr(values, "__array__") else values
    numbers = (Number, np.bool_, Tensor, np.ndarray, list, tuple)
    kinds = {type(value).__name__ for value in flat if not isinstance(value, numbers)}
    why = f"they hold {', '.join(sorted(kinds))}" if kinds else " ".join(str(error).split())
    return SampleError(
        f"{name!r}: its values cannot be stacked to one tensor ({why}). Convert them to numbers of the same shape in "
        "all samples: encode text and missing values, resize or pad the rest."
    )
