"""An optimizer and a schedule that a program brings along."""

import pytest
import torch
from torch import nn

from hvdtrain.recipe.own import own_optimizer, require_schedule, restore_groups
from tests.refusals import refused


def model():
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))


def test_groups_keep_their_rates_as_shares_of_the_highest():
    def make(model):
        groups = [{"params": model[0].parameters(), "lr": 0.01}, {"params": model[1].parameters()}]
        return torch.optim.AdamW(groups, lr=0.04)

    assert [group["share_of_lr"] for group in own_optimizer(make, model()).param_groups] == [0.25, 1.0]


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, and keeps the largest gradient there, as Prodigy does."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            group["largest"] = torch.maximum(group["largest"], group["params"][0].grad.abs().max())
        return super().step(closure)


def test_what_an_optimizer_changes_in_its_groups_comes_back_and_its_options_are_those_given_now():
    def begun(weight_decay):
        group = {"params": net.parameters(), "largest": torch.zeros(())}
        return own_optimizer(lambda _: Counting([group], lr=0.1, weight_decay=weight_decay), net)

    net = model()
    before = begun(0.1)
    net(torch.ones(1, 2)).sum().backward()
    before.step()
    again = begun(0.2)
    restore_groups(again, before.state_dict()["param_groups"])
    [group], [was] = again.param_groups, before.param_groups
    assert (group["step"], group["weight_decay"]) == (1, 0.2)
    assert group["largest"] == was["largest"] > 0


def test_the_momentum_of_a_fused_sgd_begins_at_zero_also_if_the_first_step_is_skipped():
    net = model()
    optimizer = own_optimizer(lambda net: torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, fused=True), net)
    assert [held["momentum_buffer"].count_nonzero() for held in optimizer.state.values()] == [0] * 4
    plain = own_optimizer(lambda net: torch.optim.SGD(net.parameters(), lr=0.1), net)
    assert not plain.state


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
