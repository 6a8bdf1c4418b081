"""What one step asks of the device: numbers that the host waits for."""

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.core.phases import OFF
from hvdtrain.loop.stragglers import OwnTime
from hvdtrain.loop.witnesses.skip_spikes import SkipSpikes
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from tests.steps import CPU, step_of

HOST_READ = "aten._local_scalar_dense.default"  # what .item(), bool() and float() of a tensor come down to


class Counted(TorchDispatchMode):
    """Counts the numbers that the host reads."""

    def __init__(self):
        super().__init__()
        self.host_reads = 0

    def __torch_dispatch__(self, operation, types, arguments=(), named=None):
        self.host_reads += str(operation) == HOST_READ
        return operation(*arguments, **(named or {}))


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
    batch = {"images": torch.randn(2, 3, 4, 4), "labels": torch.tensor([1, 2])}
    step([batch], **kept).read()
    with Counted() as counted:
        pending = step([batch], **kept)
    assert pending.read().skipped is None
    assert counted.host_reads == host_reads
