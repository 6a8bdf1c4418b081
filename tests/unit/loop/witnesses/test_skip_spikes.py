import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.checkpoint import state
from hvdtrain.core.finite import SPIKE, SpikeWatch
from hvdtrain.core.step import Step, Witness
from hvdtrain.core.task import Sums
from hvdtrain.loop.witnesses.find_nan import FindNan
from hvdtrain.loop.witnesses.skip_spikes import SkipSpikes
from hvdtrain.ranks.sync import GradientSync
from tests.steps import CPU, run_step, step_of
from tests.unit.loop.trainings import begun


def small():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4 * 36, 10))


def batch(seed, count=8):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, 8, 8, generator=generator), torch.arange(count) % 10


class Loud(Witness):
    """Makes the loss of some steps, 1, 2, ..., much larger, and so the gradients."""

    def __init__(self, steps):
        self._steps, self._number = steps, 0

    def begin(self, step):
        self._number += 1

    def pass_on(self, values):
        return values * 1000 if self._number in self._steps else values


def trained(*, loud=(), skip=True, steps=20, **options) -> tuple[Step, list]:
    skips = [SkipSpikes(CPU)] if skip else []
    step = step_of(small(), witnesses=[Loud(loud), *skips, *options.pop("witnesses", [])], **options)
    return step, [run_step(step, batch(number), lr=0.01).skipped for number in range(steps)]


def state_of(step):
    return [value for value in step.model.state_dict().values() if value.is_floating_point()]


def test_without_a_spike_the_weights_are_those_of_a_run_that_does_not_look():
    (one, skipped), (other, _) = trained(), trained(skip=False)
    assert skipped == [None] * 20
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(state_of(one), state_of(other), strict=True))


def test_a_spike_is_skipped_as_if_the_batch_had_not_been():
    step, skipped = trained(loud=[15], witnesses=[FindNan()])
    [why] = [one for one in skipped if one]
    assert skipped.index(why) == 14
    assert (why.source, why.rank, why.votes) == (SPIKE, None, 1)
    other = step_of(small(), witnesses=[])
    for number in [*range(14), *range(15, 20)]:
        run_step(other, batch(number), lr=0.01)
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(state_of(step), state_of(other), strict=True))


class OtherRanks(GradientSync):
    """Sums in which other ranks have voted, in step 15."""

    def __init__(self, votes):
        self._votes = votes

    def carry(self, parameter):
        self._carrier, self._steps = parameter, 0

    def finish(self):
        self._steps += 1
        self._carrier.grad += self._votes if self._steps == 15 else 0.0


@pytest.mark.parametrize(("votes", "told"), [(3.0, 3), (math.inf, 1)], ids=["few", "more than fp16 can hold"])
def test_a_rank_obeys_the_votes_of_others_also_with_a_scaled_loss(votes, told):
    scaler = GradScaler("cpu", init_scale=2.0**12)
    _, skipped = trained(sync=OtherRanks(votes), scaler=scaler)
    [why] = [one for one in skipped if one]
    assert (skipped.index(why), why.votes) == (14, told)
    assert scaler.get_scale() == 2.0**12


def test_micro_batches_are_one_loss():
    step = step_of(small(), witnesses=[skips := SkipSpikes(CPU)])
    images, labels = batch(0)
    done = run_step(step, (images[:2], labels[:2]), (images[2:], labels[2:]))
    assert skips.state_dict()["recent"][0] == pytest.approx(done.totals["loss"] / 8, rel=1e-5)


STEP = SimpleNamespace(slots=SimpleNamespace(how=GradientSync()), group=SimpleNamespace(size=1))


def refused(skips, loss, count=256):
    skips.begin(STEP)
    skips.begin_last_pass(STEP, {})
    loss = torch.tensor(float(loss))
    skips.see(Sums(loss=loss * count, count=torch.tensor(count)))
    skips.pass_on(loss).backward()
    return skips.refuse(STEP).skip.item() == 1


def test_the_rule_is_that_of_the_spikes_that_are_reported():
    draw = np.random.default_rng(0)
    losses = draw.normal(1.0, 0.1, 200) * np.where(draw.random(200) < 0.1, draw.uniform(1, 8, 200), 1.0)
    skips, watch = SkipSpikes(CPU), SpikeWatch(0)
    found = [refused(skips, loss) for loss in losses.tolist()]
    assert found == [watch.see(number, loss, 256) is not None for number, loss in enumerate(losses)]
    assert 0 < sum(found) < 30


def test_what_is_not_finite_is_not_remembered():
    skips = SkipSpikes(CPU)
    assert not any(refused(skips, loss) for loss in [1.0, math.nan, math.inf] * 30)
    assert refused(skips, 9.0)


def test_witnesses_with_a_name_go_on_after_a_checkpoint():
    before, after = begun(), begun()
    for training in (before, after):
        training.step.slots.witnesses += [Witness(), SkipSpikes(CPU)]
    *_, skips = before.step.slots.witnesses
    for number in range(70):
        refused(skips, 1.0 + number / 1000)
    state.restore(after.parts, state.shared_state(before.parts), state.per_rank_state(before.parts), step=0)
    *_, again = after.step.slots.witnesses
    assert (refused(again, 9.0), refused(skips, 9.0)) == (True, True)
    assert again.state_dict() == skips.state_dict()
