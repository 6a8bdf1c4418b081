"""Operators of a step with their kernels, FLOPs and bytes."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
# Operators that read each element of a large input twice: for its sums, then to normalise.
_TWICE = {
    "aten::native_batch_norm",
    "aten::cudnn_batch_norm",
    "aten::native_batch_norm_backward",
    "aten::cudnn_batch_norm_backward",
    "aten::native_layer_norm_backward",
}
_ROWS = {"aten::index_select", "aten::embedding", "aten::gather", "aten::index"}  # read selected rows, and indices
_OVERWRITE = {"aten::copy_", "aten::fill_", "aten::zero_", "aten::_foreach_copy_", "aten::_foreach_zero_"}
# Operators with several kernels, according to torch's CUDA sources; kernels inside cuBLAS and cuDNN are unknown.
_KERNELS = {
    "aten::convolution_backward": 2,  # for the inputs and the weights
    "aten::native_layer_norm_backward": 2,
    "aten::_scaled_dot_product_efficient_attention_backward": 3,
    "aten::embedding_dense_backward": 4,  # sorts the indices
    "aten::sort": 4,
    "aten::cumsum": 4,
    "aten::nonzero_static": 4,
}
# A kernel over lists of tensors takes a limited number of tensors, depending on the number of lists, and of chunks of
# elements: depth_to_max_tensors, kChunkSize and depth_to_max_blocks of torch's MultiTensorApply.cuh.
_LIST_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}
_LIST_BLOCKS, _CHUNK = 320, 65536
_CAT_TENSORS = 128  # tensors per kernel of cat: CAT_ARRAY_BATCH_SIZE of torch's Shape.cu


@dataclass(frozen=True, kw_only=True)
class Operation:
    """An operator that the GPU would run."""

    name: str
    kernels: int
    flops: int  # of matrix multiplications and convolutions; multiplications and additions both count
    bytes: int  # read and written
    dtype: torch.dtype | None  # of the computation


def count(
    func: Any, args: Any, kwargs: Any, *, read: Sequence[Tensor], changed: Sequence[Tensor], made: Sequence[Tensor]
) -> Iterator[Operation]:
    """Yield the operator that was called with these arguments, or nothing if the GPU does nothing for it."""
    name = func._schema.name
    is_view = not changed and {storage_of(one) for one in made} <= {storage_of(one) for one in read}
    if is_view or "empty" in name:
        return
    yield Operation(
        name=name,
        kernels=count_kernels(name, args),
        flops=count_flops(func, args, kwargs, made),
        bytes=count_bytes(name, read=read, changed=changed, made=made),
        dtype=next((tensor.dtype for tensor in (*made, *changed) if tensor.is_floating_point()), None),
    )


def tensors_in(*values: Any) -> Iterator[Tensor]:
    """Yield the tensors among the values of lists, tuples and dicts."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_in(*value)
        elif isinstance(value, dict):
            yield from tensors_in(*value.values())


def storage_of(tensor: Tensor) -> int:
    """Return the identity of a tensor's memory."""
    return int(tensor.untyped_storage()._cdata)


def changed_by(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors among the arguments that an operator changes."""
    arguments = func._schema.arguments
    writes = {one.name for one in arguments if one.alias_info is not None and one.alias_info.is_write}
    given = dict(zip((one.name for one in arguments), args, strict=False)) | kwargs
    return list(tensors_in([value for name, value in given.items() if name in writes]))


def count_bytes(name: str, *, read: Sequence[Tensor], changed: Sequence[Tensor], made: Sequence[Tensor]) -> int:
    """Return the bytes that the operator's kernels read and write, assuming cold caches."""
    changed_ids = {id(tensor) for tensor in changed}
    inputs = {id(tensor): tensor for tensor in read if not (name in _OVERWRITE and id(tensor) in changed_ids)}
    if name in _ROWS:
        return sum(_dense_bytes(one) for one in (*read[1:], *made, *made))  # the first is the table of rows
    total = sum(_dense_bytes(tensor) for tensor in (*inputs.values(), *changed, *made))
    if name in _TWICE:
        total += sum(_dense_bytes(tensor) for tensor in inputs.values() if tensor.dim() > 1)
    return total


def _dense_bytes(tensor: Tensor) -> int:
    """Return the size of a tensor in memory; an expanded tensor has its size before the expansion."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 0]
    return math.prod(sizes) * tensor.element_size()


def count_flops(func: Any, args: Any, kwargs: Any, made: Sequence[Tensor]) -> int:
    """Return the FLOPs of matrices and convolutions by torch's formulas, corrected for grouped convolutions.

    torch's formula ignores the groups in the backward pass, and gives a 14 times too high count for efficientnet_b0.
    """
    if func is _aten.convolution_backward.default:
        gradient, image, weight, transposed, wanted = args[0], args[1], args[2], args[7], args[10]
        outputs = image.numel() if transposed else gradient.numel()
        return int(2 * outputs * math.prod(weight.shape[1:]) * (wanted[0] + wanted[1]))
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))


def count_kernels(name: str, args: Any) -> int:
    """Return the number of kernels that an operator starts, according to torch's sources."""
    if name == "aten::cat":
        return math.ceil(len(args[0]) / _CAT_TENSORS)
    lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
    if lists and ("_foreach_" in name or "::_fused_" in name):
        depth = min(5, len(lists) + (not name.endswith("_")))
        chunks: int = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0])
        return max(-(-len(lists[0]) // _LIST_TENSORS[depth]), -(-chunks // _LIST_BLOCKS))
    return _KERNELS.get(name, 1)
