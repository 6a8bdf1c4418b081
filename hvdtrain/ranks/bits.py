"""Tensors of any type as integers of the same bits, for libraries that know few types."""

import torch
from torch import Tensor

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes


def bits(tensor: Tensor) -> Tensor:
    """Return a view of the tensor's memory as integers; a complex number is a pair of them."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return values.view(_INTEGERS[values.element_size()])
