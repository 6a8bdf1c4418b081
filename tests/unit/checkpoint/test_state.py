import io
import random

import numpy as np
import pytest
import torch
from torch.amp.grad_scaler import GradScaler

from hvdtrain.checkpoint import state
from hvdtrain.core.position import Position
from hvdtrain.loop.loop import position_after
from hvdtrain.loop.save_points import Decision, SavePoints
from tests.ranks import Rank
from tests.unit.loop.trainings import begun, same

STEPS = [1, 3, 4]  # 4 is the end of the first epoch


class After(SavePoints):
    """Saves after these steps."""

    def decide(self, step):
        return lambda: Decision(save=step in STEPS, leave=False)


def train(training, position):
    """To the end of the second epoch; by step what there was to be saved, and before it where the run stood."""
    saved = {}
    while position.epoch < 2:
        for report in training.epoch(position, After()):
            position = position_after(position, report, train_s=1.0)
            if report.decision.save:
                saved[position.step] = position, *frozen(training)
        training.evaluate(position.step)
        position = Position(step=position.step, epoch=position.epoch + 1)
    return saved


def frozen(training):
    """The state as it comes back from disk."""
    parts = []
    for part in (state.shared_state(training.parts), state.per_rank_state(training.parts)):
        packed = io.BytesIO()
        torch.save(part, packed)
        packed.seek(0)
        parts.append(torch.load(packed, weights_only=True))
    return parts


def bring_back(training, again):
    """What a training has to another one."""
    state.restore(again.parts, *frozen(training), step=1)


@pytest.mark.parametrize(
    ("settings", "steps"),
    [
        ({"optimizer": "sgd", "batch_size_per_rank": 8, "accumulate_steps": 2}, [1, 4]),
        ({"optimizer": "adamw", "precision": "bf16", "clip_norm": 1.0}, [3]),
        ({"optimizer": "lamb", "ema_epochs": 0.0, "augment": "cutout:4"}, [3]),
    ],
    ids=lambda value: value["optimizer"] if isinstance(value, dict) else "",
)
def test_a_training_that_is_brought_back_ends_with_the_same_bits(settings, steps):
    whole = begun(**settings)
    saved = train(whole, Position())
    for step in steps:
        position, shared, rank = saved[step]
        again = begun(**settings)
        torch.manual_seed(99)
        state.restore(again.parts, shared, rank, step=step)
        assert not same(again, whole)
        train(again, position)
        assert same(again, whole)


def test_random_numbers_of_every_kind_go_on():
    training = begun()

    def drawn():
        return random.random(), random.gauss(0, 1), np.random.standard_normal(3).tolist(), torch.rand(3).tolist()  # noqa: S311, NPY002

    drawn()
    shared, rank = frozen(training)
    following = drawn()
    state.restore(training.parts, shared, rank, step=1)
    assert drawn() == following


def test_losses_and_skipped_steps_are_remembered():
    training, again = begun(), begun()
    training.reports.spikes.recent.extend([3.0, 2.0])
    training.limits.skipped_in_a_row = 7
    bring_back(training, again)
    assert (list(again.reports.spikes.recent), again.limits.skipped_in_a_row) == ([3.0, 2.0], 7)


def test_another_number_of_ranks_gets_mean_statistics_and_new_random_numbers():
    saved = []
    for rank in (0, 1):
        training = begun(Rank(rank, 2))
        training.step.model.get_buffer("features.0.1.running_mean").fill_(rank + 1.0)
        training.step.model.get_buffer("features.0.1.num_batches_tracked").fill_(40)
        saved.append(frozen(training))
    drawn = set()
    for step, rank in ((5, 0), (5, 2), (6, 0)):
        again = begun(Rank(rank, 3))
        for _ in range(2):
            mean = state.average_state(one[1] for one in saved)
            state.restore(again.parts, saved[0][0], mean, step=step)
            number = float(torch.rand(1)), np.random.rand(), random.random()  # noqa: S311, NPY002
            drawn.add(number)
        assert again.step.model.get_buffer("features.0.1.running_mean").eq(1.5).all()
        assert again.step.model.get_buffer("features.0.1.num_batches_tracked") == 40
    assert [len(set(kind)) for kind in zip(*drawn, strict=True)] == [3] * 3


def test_options_of_the_optimizer_are_the_command_lines():
    again = begun(weight_decay=0.2)
    bring_back(begun(weight_decay=0.1), again)
    assert [group["weight_decay"] for group in again.step.optimizer.param_groups] == [0.2, 0.0]


def test_momentum_lies_as_the_parameter_does_that_it_comes_back_to():
    """torch's fused optimizers read both as they lie in memory."""
    training = begun(channels_last=True)
    next(training.epoch(Position()))
    again = begun(channels_last=False)
    bring_back(training, again)
    before, after = training.step.optimizer, again.step.optimizer
    pairs = zip(before.state.items(), after.state.items(), strict=True)
    strides = []
    for (parameter, held), (twin, brought) in pairs:
        assert torch.equal(held["momentum_buffer"], brought["momentum_buffer"])
        assert brought["momentum_buffer"].stride() == twin.stride()
        strides.append(parameter.stride() == twin.stride())
    assert not all(strides)


def test_momentum_that_was_not_saved_begins_at_zero():
    shared, rank = frozen(begun())
    shared["optimizer"]["state"].clear()  # as that of a run whose first steps were all skipped
    again = begun()
    state.restore(again.parts, shared, rank, step=1)
    found = [held["momentum_buffer"] for held in again.step.optimizer.state.values()]
    assert len(found) == len(list(again.step.model.parameters()))
    assert not any(momentum.any() for momentum in found)


def test_the_loss_scale_is_kept_and_a_new_one_begins_where_there_was_none():
    training, again = begun(), begun()
    training.step.scaler = GradScaler("cpu", init_scale=8.0)
    again.step.scaler = GradScaler("cpu", init_scale=4.0)
    bring_back(training, again)
    assert again.step.scaler.get_scale() == 8.0
    again.step.scaler = GradScaler("cpu", init_scale=4.0)
    bring_back(begun(), again)
    assert again.step.scaler.get_scale() == 4.0


def test_the_mean_over_ranks_is_that_of_each_stage():
    def rank(**values):
        buffers = [{name: torch.tensor(value) for name, value in values.items()}]
        return {"buffers": buffers, "averaged": values.keys() & {"a", "b", "n"}}

    ranks = [rank(a=1.0, n=3, u=5.0), rank(b=10.0), rank(a=2.0, n=4, u=7.0), rank(b=30.0)]  # two replicas, two stages
    [found] = state.average_state(iter(ranks))["buffers"]
    assert found == {"a": torch.tensor(1.5), "n": torch.tensor(3), "b": torch.tensor(20.0), "u": torch.tensor(5.0)}


def test_a_whole_models_state_by_name_brings_back_the_same():
    one = begun(optimizer="lamb")
    list(one.epoch(Position()))
    shared, own = frozen(one)
    other = begun(optimizer="lamb")
    named = state.join_parts([state.as_part(shared)], other.parts, fits=False)
    left = {name: value for name, value in shared.items() if name not in ("model", "average", "optimizer")}
    state.restore(other.parts, left | named, own, step=1)
    assert same(one, other)
    for mine, theirs in zip(one.step.model.parameters(), other.step.model.parameters(), strict=True):
        held, brought = one.step.optimizer.state[mine], other.step.optimizer.state[theirs]
        assert held.keys() == brought.keys()
        assert all(torch.equal(torch.as_tensor(held[name]), torch.as_tensor(brought[name])) for name in held)
