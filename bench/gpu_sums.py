"""Horovod's sums on the devices of all ranks, or of one: gradients that are sent too early, and time.

    python bench/gpu_sums.py OUT            or: hvdlaunch run -np 2 -- python bench/gpu_sums.py OUT

One rank's sum is its own tensor, so a gradient that is sent before the device has computed it would go unseen: here
each sum is doubled, so that what is read too early is wrong. For bench/gpu_day.py.
"""

import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn

from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.wire import Wire

CUDA = torch.cuda.is_available()
LATE = 200_000_000  # cycles, about 100 ms


def late(gradient: Tensor) -> Tensor:
    """The same gradient, late on the device."""
    if CUDA:
        torch.cuda._sleep(LATE)
    return gradient.clone()


def begin_doubled(values: Tensor, name: str) -> Callable[[], Any]:
    handle = hvd.allreduce_async_(values, op=hvd.Sum, name=name, prescale_factor=2.0)
    return lambda: hvd.synchronize(handle)


def require_whole_gradients(compression: str, device: torch.device) -> None:
    """Those of three steps: the first one finds the buckets, the others send them during the backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
    wire = Wire(compression, hvd.size())
    sync = BucketSync(model, wire=wire, bucket_mb=0.02, broadcast_names=list, begin_sum=begin_doubled)
    for _ in range(3):
        inputs = torch.randn(8, 64, device=device)
        alone = torch.autograd.grad(model(inputs).square().mean(), list(model.parameters()))
        model.zero_grad(set_to_none=True)
        sync.expect(1)
        outputs = model(inputs)
        outputs.register_hook(late)
        outputs.square().mean().backward()
        sync.finish()
        for parameter, gradient in zip(model.parameters(), alone, strict=True):
            torch.testing.assert_close(parameter.grad, 2 * hvd.size() * gradient, rtol=1e-2, atol=1e-3)


def sum_ms(mib: int, device: torch.device) -> float:
    """The median of 20 averages of `mib` MiB, the host's wait for each included."""
    values, times_ms = torch.ones(mib * 2**18, device=device), []
    for _ in range(25):
        started = time.perf_counter()
        hvd.allreduce_(values, op=hvd.Average, name=f"values.{mib}")
        assert values[-1].item() == 1  # waits for the device
        times_ms.append((time.perf_counter() - started) * 1000)
    return statistics.median(times_ms[5:])


def main() -> None:
    hvd.init()
    device = torch.device("cuda", hvd.local_rank() % torch.cuda.device_count()) if CUDA else torch.device("cpu")
    if CUDA:
        torch.cuda.set_device(device)
        assert hvd.nccl_built(), "Horovod was built without NCCL"
    for compression in ("none", "fp16"):
        require_whole_gradients(compression, device)
    found = {"ranks": hvd.size(), **{f"{mib} MiB, ms": sum_ms(mib, device) for mib in ((1, 25, 250) if CUDA else (1,))}}
    if hvd.rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    hvd.shutdown()


if __name__ == "__main__":
    main()
