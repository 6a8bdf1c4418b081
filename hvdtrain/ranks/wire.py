"""How a gradient travels: its memory as one block, in a type that Horovod and the sum can bear."""

import torch
from torch import Tensor

Layout = tuple[tuple[int, ...], torch.dtype]  # order of the dimensions in memory, and the gradient's own type


class Wire:
    """Horovod's compression seam, with a view of the gradient's memory in place of a copy.

    Horovod refuses tensors that are not contiguous, as channels_last kernels are, and bfloat16. In fp16 the sum does
    not overflow where the mean does not, since the ranks' losses are divided by the global batch before the sum.
    """

    def __init__(self, compression: str) -> None:
        """`compression` is 'none' or 'fp16'."""
        self._half = compression == "fp16"

    def compress(self, gradient: Tensor) -> tuple[Tensor, Layout]:
        """A contiguous tensor to be summed, and what `decompress` needs."""
        order = tuple(range(gradient.dim()))
        if not gradient.is_contiguous():
            order = tuple(sorted(order, key=gradient.stride().__getitem__, reverse=True))
        view = gradient.permute(order).contiguous()  # copies only what has gaps or overlaps
        if self._half:
            view = view.half()
        elif gradient.dtype == torch.bfloat16:
            view = view.float()
        return view, (order, gradient.dtype)

    def decompress(self, total: Tensor, layout: Layout) -> Tensor:
        """The sum in the gradient's shape, memory format and type."""
        order, dtype = layout
        back = [order.index(dimension) for dimension in range(len(order))]
        return total.permute(back).to(dtype)
