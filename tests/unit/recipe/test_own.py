"""An optimizer and a schedule that a program brings along."""

import pytest
import torch
from torch import nn

from hvdtrain.recipe.own import own_optimizer, require_schedule
from tests.refusals import refused


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_groups_keep_their_rates_as_shares_of_the_highest():
    def make(model):
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1].parameters()}]
        return torch.optim.AdamW(groups, lr=0.04)

    assert [group["share_of_lr"] for group in own_optimizer(make, model()).param_groups] == [0.25, 1.0]


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (torch.optim.SGD(model().parameters(), lr=0.1), "SGD is not a function of the model"),
        (torch.optim.SGD, "SGD is not a function of the model"),
        (lambda _: None, "returned a NoneType. Return one torch optimizer."),
        (lambda model: torch.optim.SGD(model[0].parameters(), lr=0.1), "parameter 1.weight is in none of its groups"),
        (lambda _: torch.optim.SGD(model().parameters(), lr=0.1), "4 of its parameters are not trained ones"),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.0), "its highest rate is 0"),
        (lambda model: torch.optim.LBFGS(model.parameters()), "its step needs a closure"),
    ],
)
def test_an_optimizer_that_cannot_train_is_one_line(make, line):
    message = refused(lambda: own_optimizer(make, model()))
    assert line in message
    assert message.startswith("optimizer")


@pytest.mark.parametrize("share", [None, -1.0, float("nan"), "1"])
def test_a_schedule_returns_a_share_of_the_peak(share):
    require_schedule(lambda progress: 1 - progress)
    assert "is not a share of the peak rate" in refused(lambda: require_schedule(lambda _: share))
