import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe
from torch.testing._internal.distributed.fake_pg import FakeStore

from hvdtrain.parallel.stages.pipeline import Pipeline

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank():
    """A world of torch.distributed, which sends nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("order", "count", "kind"),
    [("1f1b", 4, Schedule1F1B), ("1f1b", 3, ScheduleGPipe), ("gpipe", 4, ScheduleGPipe)],
)
def test_with_fewer_micro_batches_than_stages_there_is_one_order(order, count, kind):
    _, schedule = Pipeline(1, 4, CPU, order=order)._schedule(count, training=True)
    assert type(schedule) is kind


class Scale(nn.Module):
    """Micro-batch number n has the value n + 1."""

    def __init__(self):
        super().__init__()
        self.factor = nn.Parameter(torch.ones(1))

    def forward(self, number, _):
        return self.factor * (number + 1)


def test_the_gradients_of_micro_batches_are_added():
    model = Scale()
    Pipeline(0, 1, CPU).run(3, forward=model, loss=lambda _, output: output.sum(), make_buffer=torch.empty)
    assert model.factor.grad.tolist() == [1 + 2 + 3]
