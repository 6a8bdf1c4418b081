"""Gradients are sent only once the device has computed them. As a program, python -m tests.gpu.test_sums COMPRESSION
REDUCER, it is a rank.

The sum of one rank is its own tensor, so that a gradient which is sent too early would go unseen: each sum is doubled
here, and what is read too early is wrong.
"""

import os
import subprocess
import sys
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.wire import Wire
from hvdtrain.settings.safety.calls import NOWHERE

LATE = 200_000_000  # cycles, some 100 ms


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("reducer", ["bucket", "horovod"])
@pytest.mark.parametrize("compression", ["none", "fp16"])
def test_no_gradient_is_sent_before_it_is_computed(compression, reducer):
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "MPIEXEC_TIMEOUT": "200"}
    command = ["mpirun", "-np", "1", sys.executable, "-m", "tests.gpu.test_sums", compression, reducer]
    done = subprocess.run(command, env={**os.environ, **as_root}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def buckets(model, wire):
    import horovod.torch as hvd

    def begin_doubled(values, name):
        handle = hvd.allreduce_async_(values, op=hvd.Sum, name=name, prescale_factor=2.0)
        return lambda: hvd.synchronize(handle)

    comm = SimpleNamespace(allgather=lambda names: [names], begin_sum=begin_doubled, calls=NOWHERE)
    return BucketSync(model, comm, wire, bucket_mb=0.02)


def distributed_optimizer(model, wire):
    """hvd.DistributedOptimizer, which sums what is ready at once, as far as the fusion threshold allows."""
    from horovod.torch import optimizer

    from hvdtrain.ranks.distributed_optimizer import HorovodSync

    optimizer.size = lambda: 2  # of one rank it would hook no gradients
    begin_sum = optimizer.allreduce_async_
    optimizer.allreduce_async_ = lambda *given, **how: begin_sum(*given, **how | {"prescale_factor": 2.0})
    # on two hosts, so that hooks send
    comm = SimpleNamespace(size=2, local_size=1, wait_context=nullcontext, calls=NOWHERE)
    return HorovodSync(model, comm, wire, groups=None)


def main(compression, reducer):
    """Three steps: the first one finds the buckets, the others send them during the backward pass."""
    import horovod.torch as hvd

    def late(gradient):
        if gradient.is_cuda:
            torch.cuda._sleep(LATE)
        return gradient.clone()

    hvd.init()
    device = torch.device("cuda", hvd.local_rank()) if torch.cuda.is_available() else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))).to(device)
    wire = Wire(hvd.size(), is_half=compression == "fp16")
    sync = {"bucket": buckets, "horovod": distributed_optimizer}[reducer](model, wire)
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
    hvd.shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
