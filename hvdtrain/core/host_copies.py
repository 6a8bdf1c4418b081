"""Copies on the host of what a device holds, and back."""

from typing import Any

import torch
from torch import Tensor


def copy_to_host(value: Any) -> Any:
    """The value with copies of its tensors, in dicts, lists and tuples; the host waits once for a GPU.

    The copies of a GPU's tensors are in pinned memory.
    """
    copied = _begin_copy(value)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copied


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """The host's tensor on the device; by way of pinned memory, so that the host does not wait for a GPU."""
    pinned = values.pin_memory() if device.type == "cuda" else values
    return pinned.to(device, non_blocking=True)


def _begin_copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        values = value.detach()
        return torch.empty_like(values, device="cpu", pin_memory=values.is_cuda).copy_(values, non_blocking=True)
    if isinstance(value, dict):
        return {key: _begin_copy(element) for key, element in value.items()}
    if isinstance(value, list | tuple):
        copies = [_begin_copy(element) for element in value]
        return copies if isinstance(value, list) else tuple(copies)
    return value
