"""What one step asks of the device: operations, and numbers that the host waits for. Golden, for the pinned torch."""

from collections import Counter
from functools import cache

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.core.phases import OFF
from hvdtrain.loop.stragglers import OwnTime
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.vision import models
from hvdtrain.witnesses.skip_spikes import SkipSpikes
from tests.steps import CPU, step_of

HOST_READ = "aten._local_scalar_dense.default"  # what .item(), bool() and float() of a tensor come down to


class Counted(TorchDispatchMode):
    """Counts what is dispatched; a foreach operation is one, as it is a few kernels on a GPU."""

    def __init__(self):
        super().__init__()
        self.operations = Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.operations[str(operation)] += 1
        return operation(*arguments, **(named or {}))


def batch():
    generator = torch.Generator().manual_seed(0)
    return {"images": torch.randn(2, 3, 32, 32, generator=generator), "labels": torch.tensor([1, 2])}


def b0():
    torch.manual_seed(0)
    return models.build("efficientnet_b0", classes=10).train()


def optimizer_for(name, model):
    return optim.BUILD[name](optim.parameter_groups(model, 5e-4, decay_all=False), 0.01)


@cache
def shortest_loop(name):
    """Forward, backward and optimizer of the second step, the first one with its optimizer's state."""
    model = b0()
    optimizer, parts = optimizer_for(name, model), batch()

    def one():
        optimizer.zero_grad()
        functional.cross_entropy(model(parts["images"]), parts["labels"]).backward()
        optimizer.step()

    one()
    with Counted() as counted:
        one()
    return counted.operations


def our_step(name, *, average=False, on_spike="report", **options):
    model = b0()
    step = step_of(
        model,
        optimizer=optimizer_for(name, model),
        average=MovingAverage(model, horizon_steps=10.0) if average else None,
        witnesses=[SkipSpikes(CPU)] if on_spike == "skip" else [],
        phases=OwnTime(OFF, CPU),
        **options,
    )
    kept = {"backward_passes": 1, "global_count": 2, "lr": 0.01}
    step([batch()], **kept).read()
    with Counted() as counted:
        pending = step([batch()], **kept)
    assert pending.read().skipped is None
    return counted.operations


@pytest.mark.parametrize(
    ("optimizer", "options", "more", "host_reads"),
    [
        ("sgd", {}, 39, 0),
        ("sgd", {"average": True, "clip_value": 1.0, "clip_norm": 1.0}, 61, 0),
        ("sgd", {"on_spike": "skip"}, 97, 0),  # the threshold stays on the device
        ("lamb", {}, 40, 1),  # only torch's fused optimizers can skip a step by themselves
    ],
)
def test_a_step_adds_so_many_operations_to_the_shortest_loop(optimizer, options, more, host_reads):
    ours, shortest = our_step(optimizer, **options), shortest_loop(optimizer)
    assert ours[HOST_READ] - shortest[HOST_READ] == host_reads
    assert ours.total() - shortest.total() == more


def test_a_second_micro_batch_casts_no_weight_again():
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 10, bias=False))
    step = step_of(model, precision="bf16", witnesses=[])
    cast_shapes = []

    class Casts(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, arguments=(), named=None):
            if operation is torch.ops.aten._to_copy.default and named["dtype"] == torch.bfloat16:
                cast_shapes.append(tuple(arguments[0].shape))
            return operation(*arguments, **(named or {}))

    batches = [{"images": torch.randn(2, 3, 4, 4), "labels": torch.tensor([1, 2])} for _ in range(3)]
    with Casts():
        step(iter(batches), backward_passes=3, global_count=6.0, lr=0.1)
    assert cast_shapes.count((10, 48)) == 1
    assert cast_shapes.count((2, 48)) == 3
