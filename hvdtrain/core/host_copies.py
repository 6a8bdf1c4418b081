"""Copies between the device and the host."""

from typing import Any

import torch
from torch import Tensor


def copy_to_host(value: Any) -> Any:
    """Return the value with its tensors copied to the host, in dicts, lists and tuples; waits once for a GPU.

    Copies of a GPU's tensors are in pinned memory.
    """
    copied = _begin_copy(value)
    if torch.cuda.is_initialized():
        torch.cuda.current_stream().synchronize()
    return copied


def copy_to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to the device, through pinned memory so that the host does not wait for a GPU."""
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
