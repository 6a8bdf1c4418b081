"""Operators of a step with their kernels, FLOPs and bytes, counted as they are dispatched."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

_aten = torch.ops.aten
EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
# Views that are not marked in their schema, or for which torch has no schema.
VIEWS = {_aten.detach.default, _aten.alias.default, _aten._unsafe_view.default, _aten.lift_fresh.default}
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
    "aten::_scaled_dot_product_flash_attention_backward": 3,
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


class Counts:
    """Everything dispatched since the beginning, or since `restart`."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Restart the counts at zero."""
        self.operations: list[Operation] = []

    @property
    def kernels(self) -> int:
        return sum(one.kernels for one in self.operations)

    @property
    def flops(self) -> int:
        return sum(one.flops for one in self.operations)

    @property
    def bytes(self) -> int:
        return sum(one.bytes for one in self.operations)

    def by_name(self) -> Counter[str]:
        """Return the number of calls of each operator."""
        return Counter(one.name for one in self.operations)

    def add(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        *,
        read: Sequence[Tensor],
        changed: Sequence[Tensor],
        made: Sequence[Tensor],
    ) -> None:
        """Count an operator, except views and empty tensors, for which the GPU does nothing."""
        if func in EMPTY or is_view(func):
            return
        name = func._schema.name
        of_results = next((one.dtype for one in (*made, *changed) if one.is_floating_point()), None)
        self.operations.append(
            Operation(
                name=name,
                kernels=count_kernels(name, args),
                flops=count_flops(func, args, kwargs, made),
                bytes=count_bytes(name, read=read, changed=changed, made=made),
                dtype=of_results,
            )
        )

    def add_copy(self, tensor: Tensor) -> None:
        """Count a copy from the GPU to the host."""
        copied = Operation(name="copy to host", kernels=1, flops=0, bytes=tensor.nbytes, dtype=None)
        self.operations.append(copied)


def is_view(func: Any) -> bool:
    """Return whether an operator returns memory of its arguments."""
    return func in VIEWS or bool(func.is_view)


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
    if func is _aten.convolution.default:
        outputs = args[0].numel() if args[6] else made[0].numel()
        return int(2 * outputs * math.prod(args[1].shape[1:]))
    formula = flop_registry.get(func._overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=made[0] if len(made) == 1 else tuple(made)))


def count_kernels(name: str, args: Any) -> int:
    """Return the number of kernels that an operator starts, according to torch's sources."""
    if "_foreach_" in name or "::_fused_" in name:
        lists = [one for one in args if isinstance(one, list | tuple) and one and isinstance(one[0], Tensor)]
        depth = min(5, max(1, len(lists) + (not name.endswith("_"))))
        chunks = sum(-(-tensor.numel() // _CHUNK) for tensor in lists[0]) if lists else 1
        tensors = len(lists[0]) if lists else 1
        return max(-(-tensors // _LIST_TENSORS[depth]), -(-chunks // _LIST_BLOCKS))
    if name == "aten::cat":
        return max(1, -(-len(args[0]) // _CAT_TENSORS))
    return _KERNELS.get(name, 1)
