"""What one step asks of the device: numbers that the host waits for, and casts of weights."""

from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.core.phases import OFF
from hvdtrain.loop.stragglers import OwnTime
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.witnesses.skip_spikes import SkipSpikes
from tests.steps import CPU, step_of

HOST_READ = "aten._local_scalar_dense.default"  # what .item(), bool() and float() of a tensor come down to


class Counted(TorchDispatchMode):
    """Counts what is dispatched, and casts to bf16 by their shape."""

    def __init__(self):
        super().__init__()
        self.operations, self.casts = Counter(), Counter()

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.operations[str(operation)] += 1
        if operation is torch.ops.aten._to_copy.default and named["dtype"] == torch.bfloat16:
            self.casts[tuple(arguments[0].shape)] += 1
        return operation(*arguments, **(named or {}))


def batch():
    return {"images": torch.randn(2, 3, 4, 4), "labels": torch.tensor([1, 2])}


@pytest.mark.parametrize(
    ("optimizer", "options", "host_reads"),
    [
        ("sgd", {}, 0),
        ("adamw", {"clip_value": 1.0, "clip_norm": 1.0}, 0),
        ("sgd", {"witnesses": [SkipSpikes(CPU)]}, 0),  # the threshold stays on the device
        ("lamb", {}, 1),  # only torch's fused optimizers can skip a step by themselves
    ],
)
def test_the_host_waits_for_no_number_of_a_step(optimizer, options, host_reads):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 10)).train()
    step = step_of(
        model,
        optimizer=optim.BUILD[optimizer](optim.parameter_groups(model, 5e-4, decay_all=False), 0.01),
        average=MovingAverage(model, horizon_steps=10.0),
        phases=OwnTime(OFF, CPU),
        **{"witnesses": [], **options},
    )
    kept = {"backward_passes": 1, "global_count": 2, "lr": 0.01}
    step([batch()], **kept).read()
    with Counted() as counted:
        pending = step([batch()], **kept)
    assert pending.read().skipped is None
    assert counted.operations[HOST_READ] == host_reads


def test_a_second_micro_batch_casts_no_weight_again():
    step = step_of(nn.Sequential(nn.Flatten(), nn.Linear(48, 10, bias=False)), precision="bf16", witnesses=[])
    with Counted() as counted:
        step([batch() for _ in range(3)], backward_passes=3, global_count=6.0, lr=0.1)
    assert (counted.casts[10, 48], counted.casts[2, 48]) == (1, 3)
