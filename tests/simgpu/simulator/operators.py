"""What the simulated GPU must know of torch's operators."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

aten: Any = torch.ops.aten

# Their result's size or value is read by the host.
READ_BY_HOST = {
    aten._local_scalar_dense.default,
    aten.nonzero.default,
    aten.masked_select.default,
    aten._unique2.default,
    aten.unique_dim.default,
    aten.unique_consecutive.default,
    aten.equal.default,
    aten.is_nonzero.default,
    aten.repeat_interleave.Tensor,
    aten.bincount.default,
}
BY_INDICES = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
COPIES = {aten.copy_.default, aten._to_copy.default}
WITHOUT_KERNEL = {  # and no views: they only make memory
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
    aten._unsafe_view.default,
}


@dataclass(frozen=True, kw_only=True)
class Operator:
    """What the schema says."""

    written_arguments: tuple[tuple[int, str], ...]  # place and name
    returns_written: int | None  # how many of them are what is returned; None if that is new
    is_view: bool
    takes_host_scalars: bool  # of no dimension, as the arguments of its kernel

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that are written to, each a tensor or a list of them."""
        return [args[place] if place < len(args) else kwargs.get(name) for place, name in self.written_arguments]


@cache
def operator_of(func: Any) -> Operator:
    """Of one of torch's overloads."""
    schema = func._schema
    written = [
        (place, one.name)
        for place, one in enumerate(schema.arguments)
        if one.alias_info is not None and one.alias_info.is_write
    ]
    aliases = [one.alias_info for one in schema.returns]
    is_written = bool(written) and all(alias is not None and alias.is_write for alias in aliases)
    return Operator(
        written_arguments=tuple(written),
        returns_written=len(aliases) if is_written else None,
        is_view=not written and any(alias is not None for alias in aliases),
        takes_host_scalars=torch.Tag.pointwise in func.tags or "_foreach_" in schema.name,
    )


def tensors_in(values: Any) -> Iterator[Tensor]:
    """Those among an operator's arguments, also in lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(value)


def _cudnn_batch_norm(
    features: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *options: Any
) -> tuple[Tensor, ...]:
    outputs = aten.native_batch_norm(features, weight, bias, mean, variance, *options)
    return *outputs, features.new_empty(0, dtype=torch.uint8)


def _cudnn_batch_norm_backward(features: Tensor, gradient: Tensor, weight: Tensor, *saved: Any) -> tuple[Tensor, ...]:
    *statistics, epsilon, _ = saved  # running and saved ones
    wanted = [True, True, True]
    gradients: tuple[Tensor, ...] = aten.native_batch_norm_backward(
        gradient, features, weight, *statistics, True, epsilon, wanted
    )
    return gradients


# What has no kernel for the host.
ON_HOST: dict[Any, Callable[..., Any]] = {
    aten.cudnn_batch_norm.default: _cudnn_batch_norm,
    aten.cudnn_batch_norm_backward.default: _cudnn_batch_norm_backward,
}
