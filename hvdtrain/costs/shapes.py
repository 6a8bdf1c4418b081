"""Tensors without values on an absent GPU: torch sees `cuda:0`, and operators compute shapes on meta."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

GPU = torch.device("cuda", 0)
META = torch.device("meta")

_aten = torch.ops.aten


class ShapeTensor(torch.Tensor):
    """A tensor of the absent GPU; `shape_only` is its copy on meta, where views share a storage as on a GPU."""

    shape_only: Tensor

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls: type["ShapeTensor"], shape_only: Tensor) -> "ShapeTensor":
        made: ShapeTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            shape_only.size(),
            strides=shape_only.stride(),
            storage_offset=shape_only.storage_offset(),
            dtype=shape_only.dtype,
            layout=shape_only.layout,
            device=GPU,
        )
        made.shape_only = shape_only
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise RuntimeError(f"{func}: a tensor of the absent GPU is used where that GPU is not")

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        if id(self) not in memo:
            with torch.no_grad():
                copied: Tensor = self.detach().clone(memory_format=torch.preserve_format)
            is_parameter = getattr(self, "_is_param", False)
            memo[id(self)] = torch.nn.Parameter(copied, self.requires_grad) if is_parameter else copied
        made: Tensor = memo[id(self)]
        return made

    def tolist(self) -> Any:
        return self.cpu().tolist()


def compute(func: Any, args: Any, kwargs: Any) -> Any:
    """Return an operator's new tensors for tensors on meta, in the memory layouts of GPU kernels.

    torch's functions for meta take a millisecond each, and many layers are equal: each distinct call is made once.
    """
    key = _key((func, args, kwargs))
    try:
        made = _MADE.get(key)
    except TypeError:  # an argument is not hashable
        return _OF_GPU.get(func, func)(*args, **kwargs)
    if made is None:
        made = _MADE[key] = map_values(_layout_or_value, _OF_GPU.get(func, func)(*args, **kwargs))
    return map_values(_empty_or_value, made)


def map_values(change: Callable[[Any], Any], value: Any) -> Any:
    """Change each value in nested lists, tuples and dicts; five times as fast as torch's tree_map."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind([map_values(change, one) for one in value])
    if kind is dict:
        return {name: map_values(change, one) for name, one in value.items()}
    return change(value)


def tensors_in(*values: Any) -> Iterator["ShapeTensor"]:
    """Yield the absent GPU's tensors among the values of lists, tuples and dicts."""
    for value in values:
        if isinstance(value, ShapeTensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


class _Layout(tuple[Any, ...]):
    """Size, strides and type of a tensor."""

    __slots__ = ()


_MADE: dict[Any, Any] = {}  # operator and layouts of its arguments -> layouts of its results


def _layout_or_value(value: Any) -> Any:
    return _Layout((value.size(), value.stride(), value.dtype)) if isinstance(value, Tensor) else value


def _empty_or_value(value: Any) -> Any:
    if not isinstance(value, _Layout):
        return value
    size, strides, dtype = value
    return torch.empty_strided(size, strides, dtype=dtype, device=META)


def _key(value: Any) -> Any:
    """Return a key that is equal for calls with equal results; 1, 1.0 and True differ."""
    if isinstance(value, Tensor):
        return _layout_or_value(value)
    if isinstance(value, list | tuple):
        return tuple(map(_key, value))
    if isinstance(value, dict):
        return tuple((name, _key(one)) for name, one in value.items())
    return type(value), value


def _is_channels_last(tensor: Tensor) -> bool:
    return (
        tensor.dim() == 4
        and tensor.is_contiguous(memory_format=torch.channels_last)
        and not tensor.is_contiguous()  # 1 x 1 pixels are both
    )


def _convolution(image: Tensor, weight: Tensor, *rest: Any, **named: Any) -> Tensor:
    """Return a convolution's output, channels_last if an input is, like cuDNN; torch's function for meta is not."""
    output: Tensor = _aten.convolution.default(image, weight, *rest, **named)
    last = _is_channels_last(image) or _is_channels_last(weight)
    return output.contiguous(memory_format=torch.channels_last) if last and output.dim() == 4 else output


def _convolution_backward(gradient: Tensor, image: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor | None, ...]:
    wanted = rest[-1]
    bias = gradient.new_empty(gradient.shape[1]) if wanted[2] else None
    return torch.empty_like(image) if wanted[0] else None, torch.empty_like(weight) if wanted[1] else None, bias


def _nonzero_static(values: Tensor, *, size: int, **_: Any) -> Tensor:
    return values.new_empty((size, values.dim()), dtype=torch.int64)


_OF_GPU: dict[Any, Callable[..., Any]] = {
    _aten.convolution.default: _convolution,
    _aten.convolution_backward.default: _convolution_backward,
    _aten.nonzero_static.default: _nonzero_static,
}
