import pytest
import torch
from torch import nn

from hvdtrain.parallel.sync.two_level import TwoLevelSync
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.ranks.wire import Wire


class Near(GradientSync):
    """Inside the group: what is asked of it, and a sum that doubles each gradient."""

    def __init__(self, model):
        self.asked, self.overlap, self._model = [], True, model

    def finish(self):
        for parameter in self._model.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2

    def end_step(self, *, overflowed):
        self.asked.append(("update", overflowed))

    def load_state_dict(self, state):
        self.asked.append(("load", state))


@pytest.fixture
def model():
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1, bias=False).double(), nn.Linear(1, 1))
    model[2].requires_grad_(requires_grad=False)
    return model


def synced(model, sums, compression="none"):
    """Of 4 ranks; between groups each element becomes ten times as large."""

    def sum_between(flat):
        sums.append((flat.dtype, len(flat)))
        flat *= 10

    return TwoLevelSync(Near(model), model, sum_between, Wire(4, is_half=compression == "fp16"))


def test_gradients_are_summed_in_the_group_and_then_between_groups(model):
    sums = []
    sync = synced(model, sums)
    model[0].weight.grad = torch.ones(3, 2)
    model[1].weight.grad = torch.full((1, 3), 2.0, dtype=torch.float64)
    sync.finish()
    assert sums == [(torch.float32, 9), (torch.float64, 3)]
    assert model[0].weight.grad.tolist() == [[20.0, 20.0]] * 3
    assert model[1].weight.grad.tolist() == [[40.0] * 3]
    assert model[0].bias.grad.tolist() == [0.0] * 3  # no gradient here: other groups may have one
    assert model[2].weight.grad is None


def test_in_fp16_half_as_many_bytes_leave_the_group_scaled_so_that_they_do_not_vanish(model):
    sums = []
    sync = synced(model, sums, "fp16")
    model[0].weight.grad = torch.full((3, 2), 2.0**-26)
    model[1].weight.grad = torch.full((1, 3), 2.0, dtype=torch.float64)
    sync.finish()
    assert sums == [(torch.float16, 9), (torch.float16, 3)]
    assert model[0].weight.grad.tolist() == [[20 * 2.0**-26] * 2] * 3  # alone it becomes 0 in fp16
    assert model[1].weight.grad.tolist() == [[40.0] * 3]
    model[0].weight.grad = torch.full((3, 2), 65504 / 8 / 2)
    sync.finish()
    assert model[0].weight.grad.tolist() == [[torch.inf] * 2] * 3
    assert sync.state_dict() == {"scale": 4.0, "calm_steps": 0}
    sync.end_step(overflowed=True)
    assert sync.state_dict() == {"scale": 2.0, "calm_steps": 0}


def test_apart_nothing_leaves_the_group(model):
    sums = []
    sync = synced(model, sums)
    sync.is_apart = True
    model[0].weight.grad = torch.ones(3, 2)
    sync.finish()
    assert sums == []
    assert model[0].weight.grad.tolist() == [[2.0, 2.0]] * 3
    assert model[0].bias.grad is None


def test_what_else_is_asked_of_it_is_the_groups(model):
    sync = synced(model, [], "fp16")
    sync.overlap = False
    sync.expect(3)
    assert sync._in_group.overlap is False
    sync.end_step(overflowed=True)
    sync.load_state_dict(sync.state_dict())
    assert sync._in_group.asked == [("update", True), ("load", {"scale": 2.0, "calm_steps": 0})]
