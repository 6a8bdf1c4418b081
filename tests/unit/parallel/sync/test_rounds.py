import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.every_step import EveryStep
from hvdtrain.core.layout import Layout
from hvdtrain.parallel.sync.comm import SyncSchedule
from hvdtrain.parallel.sync.groups import GroupSums
from hvdtrain.parallel.sync.rounds import LocalRounds
from hvdtrain.parallel.sync.two_level import TwoLevelSync
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.settings.safety.errors import EndOfRun, SkippedStepsError
from tests.ranks import Mpi, together
from tests.steps import draft_of


class One:
    """The model of one group, with all that belongs to it."""

    def __init__(self, comm, *, every=4, from_epoch=0, begin=(0, 0), optimizer="sgd", scaler=None, sum_tied=None):
        torch.manual_seed(0)
        self.rank = comm.rank
        self.model = nn.Linear(2, 1)
        self.average = MovingAverage(self.model, horizon_steps=5)
        self.optimizer = optim.BUILD[optimizer]([{"params": list(self.model.parameters())}], 0.1)
        sync = TwoLevelSync(GradientSync(), self.model, lambda _: None, Wire(4, is_half=True))
        mpi = Mpi(comm)  # ranks that are a group each
        where = Layout()
        if sum_tied is not None:
            where.part = SimpleNamespace(sum_tied=lambda _, tensors_of: sum_tied(tensors_of))
        draft = draft_of(comm, self.model, self.optimizer, how=sync, average=self.average, scaler=scaler, where=where)
        sums = GroupSums(MpiMembers(mpi.Split(comm.rank, 0)), MpiMembers(mpi))
        self.rounds = LocalRounds(draft, sync, sums, SyncSchedule(steps=every, from_epoch=from_epoch))
        self.sync = sync
        self.rounds.begin(*begin)

    def step(self, gradient):
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, gradient)
        self.optimizer.step()

    def numbers(self):
        states = [self.optimizer.state[parameter] for parameter in self.model.parameters()]
        held = [value for state in states for _, value in sorted(state.items())]
        return [tensor.detach().flatten().tolist() for tensor in (*self.model.parameters(), *held)]


@pytest.mark.parametrize(
    ("every", "epoch", "met"),
    [
        (4, 1, [12, 16, 20, 21]),
        (99, 1, [21]),
        (4, 0, list(range(11, 22))),  # rounds begin with the next epoch
    ],
)
def test_groups_meet_after_so_many_steps_of_the_run_and_at_the_end_of_an_epoch(every, epoch, met):
    def program(comm):
        one = One(comm, every=every, from_epoch=1, begin=(epoch, 10))
        assert one.sync.is_apart == one.rounds.is_apart == (epoch == 1)
        return [step for step in range(11, 22) if one.rounds.syncs_after(step, last=21)]

    assert together(1, program) == [met]
    assert all(EveryStep().syncs_after(step, last=21) for step in range(11, 22))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_where_they_meet_parameters_and_what_the_optimizer_remembers_become_means(optimizer):
    def program(comm):
        one = One(comm, optimizer=optimizer)
        for _ in range(3):
            one.step(1.0 + comm.rank)
        before = one.numbers()
        assert one.rounds.sync(4, None) is None
        return before, one.numbers()

    (first, met), (second, also) = together(2, program)
    assert first != second
    assert met == also
    assert len(met) > 2  # something is remembered
    for one, other, mean in zip(first, second, met, strict=True):
        assert mean == pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)], rel=1e-6)


def test_what_two_ranks_of_a_replica_hold_is_the_mean_of_what_both_have():
    def program(comm, times):
        def sum_tied(tensors_of):
            for tensor in tensors_of(one.model.weight):
                tensor.mul_(times)

        one = One(comm, optimizer="adamw", sum_tied=sum_tied if times else None)
        one.step(1.0 + comm.rank)
        one.rounds.sync(4, None)
        return one.numbers()

    alone, alike, other = (together(1, partial(program, times=times))[0] for times in (0, 2, 3))
    assert alike == alone
    changed = [ours != theirs for ours, theirs in zip(alike, other, strict=True)]
    assert changed == [True, False, True, True, True, False, False, False]  # the weight, and what AdamW has of it


def test_a_group_that_has_skipped_all_steps_is_equal_too():
    """All but one rank, a group by itself, have."""

    def program(comm):
        one = One(comm, optimizer="adamw")
        if comm.rank == 1:
            one.step(1.0)
        one.rounds.sync(4, None)
        return one.numbers()

    one, other = together(2, program)
    assert one == other
    assert all(math.isfinite(number) for numbers in one for number in numbers)


def test_a_parameter_that_is_not_trained_keeps_its_bits():
    def program(comm):
        one = One(comm)
        one.model.frozen = nn.Parameter(torch.tensor([0.1]), requires_grad=False)
        one.rounds.sync(4, None)
        return one.model.frozen.item()

    assert together(2, program) == [torch.tensor(0.1).item()] * 2


def test_the_moving_average_goes_as_far_as_in_the_steps_since_they_met():
    def program(comm):
        one = One(comm, begin=(0, 10))
        one.step(1.0)
        one.rounds.sync(12, None)
        one.rounds.sync(16, None)
        return int(one.average.n_averaged), one.average.module.weight.tolist(), one.model.weight.tolist()

    def stepwise():
        model = nn.Linear(2, 1)
        average = MovingAverage(model, horizon_steps=5)
        with torch.no_grad():
            model.weight += 1.0
        start = average.module.weight.clone()
        for _ in range(6):
            average.follow(torch.zeros(()))
        return ((average.module.weight - start) / (model.weight - start)).mean().item()

    (counted, average, weight), _ = together(2, program)
    assert counted == 6
    torch.manual_seed(0)
    start = nn.Linear(2, 1).weight
    share = (torch.tensor(average) - start) / (torch.tensor(weight) - start)
    assert share.mean().item() == pytest.approx(stepwise(), rel=1e-4)


def test_all_go_on_with_the_smallest_scale_of_loss_and_of_gradients_in_fp16():
    def program(comm):
        scaler = GradScaler("cpu", init_scale=2.0 ** (8 - comm.rank))
        one = One(comm, scaler=scaler)
        scaler.scale(torch.ones(()))  # which makes its tensors
        one.sync.end_step(overflowed=comm.rank == 1)
        one.rounds.sync(4, None)
        return scaler.get_scale(), one.sync.state_dict()

    assert together(3, program) == [(64.0, {"scale": 2.0, "calm_steps": 0})] * 3


def test_the_run_ends_for_all_where_it_does_for_one():
    def program(comm):
        one = One(comm)
        end = SkippedStepsError("too many", status=3, reason="why") if comm.rank == 1 else None
        ended = one.rounds.sync(4, end)
        return type(ended), str(ended), ended.status, ended.reason

    assert together(2, program) == [(SkippedStepsError, "too many", 3, "why")] * 2


def test_together_nothing_is_averaged():
    def program(comm):
        one = One(comm, from_epoch=1)
        one.step(1.0 + comm.rank)
        end = EndOfRun("too many", status=3, reason="why")
        assert one.rounds.sync(4, end) is end
        return one.numbers()

    first, second = together(2, program)
    assert first != second
