"""The loop with a task that is not about images: sentences of unequal length, predicted word by word."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from hvdtrain.core.blocks import blocks_of
from hvdtrain.core.position import Position
from hvdtrain.core.task import Sums, Task, added
from hvdtrain.insight.profiling.verdict import REMEDIES
from hvdtrain.insight.tracking.gauges import Gauges
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.loop.feed.feed import Feed, Resident
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.reports import Reports
from hvdtrain.loop.witnesses.injected import InjectedFaults
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.settings.safety.faults import NONE, Faults
from tests.ranks import Rank
from tests.refusals import refused
from tests.steps import CPU, loop_of, rate_of, step_of

SENTENCES, LONGEST, WORDS = 21, 9, 5
PAD = -100
SHORTER = {"read": "shorter sentences"}


class NextWords(Task):
    """Each word from the one before; a sentence weighs as many words as it predicts."""

    unit = "sentences"
    best = "perplexity"
    higher_is_better = False
    remedies = SHORTER

    def __init__(self, lengths):
        self.lengths = lengths
        self.prepared = []

    def counts(self, samples):
        return self.lengths[samples].float() - 1

    def cost(self, samples):
        return self.lengths[samples]

    def prepare(self, raw, samples, epoch):
        self.prepared += [(epoch, sample) for sample in samples.tolist()]
        words = raw["words"]
        targets = words[:, 1:].masked_fill(torch.arange(1, LONGEST) >= raw["length"][:, None], PAD)
        return {"words": words[:, :-1], "targets": targets}

    def loss(self, model, batch, *, training):
        assert model.training is training  # the model's attributes are at hand, however it is called
        logits = model(batch["words"])  # (N, L, V)
        targets = batch["targets"].flatten()
        loss = functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum", ignore_index=PAD)
        return Sums(loss=loss, count=(targets != PAD).sum())

    def metrics(self, totals):
        loss = totals["loss"] / totals["count"] if totals else math.nan
        return {"loss": loss, "perplexity": math.exp(loss)}


def sentences():
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(0, WORDS, (SENTENCES, LONGEST), generator=generator)
    return Resident(words=words, length=torch.randint(2, LONGEST + 1, (SENTENCES,), generator=generator))


def predictor():
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(WORDS, 4), nn.Linear(4, WORDS))


class Kept(GradientSync):
    """Keeps the gradients of each step; the weights stay, for the learning rate is 0."""

    def __init__(self, model):
        self.model, self.steps = model, []

    def finish(self):
        self.steps.append(torch.cat([weight.grad.flatten() for weight in self.model.parameters()]))


def epoch_of(rank, size, *, micro_batch, epoch=0, max_skipped_steps=1, faults=NONE, **options):
    """One rank's gradients of each step, its task and its reports."""
    split, model = sentences(), predictor()
    task, comm, sync = NextWords(split.tensors["length"]), Rank(rank, size), Kept(model)
    step = step_of(model, task=task, comm=comm, sync=sync, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    feed = Feed(
        split, task, comm, BatchSizes(micro_batch=micro_batch, global_batch=8, steps_per_epoch=3), seed=0, device=CPU
    )
    lr = rate_of(0.0, 3)
    limits = Limits(step, max_skipped_steps=max_skipped_steps, check_replicas_every=0)
    reports = Reports(comm, Gauges(dict), task, every_steps=100, device=CPU)
    injected = InjectedFaults(faults, model)
    step.slots.witnesses.append(injected)
    loop = loop_of(step, feed, rate=lr, reports=reports, **options)
    loop.hooks = [limits, injected]
    made = list(loop.steps(Position(epoch=epoch)))
    return sync.steps, task, made


@pytest.mark.parametrize(("size", "micro_batch"), [(2, 4), (3, 1)])
def test_ranks_together_take_the_step_of_the_mean_loss_per_word(size, micro_batch):
    whole, _, _ = epoch_of(0, 1, micro_batch=8)
    of_ranks = [epoch_of(rank, size, micro_batch=micro_batch)[0] for rank in range(size)]
    assert len(whole) == 3
    for alone, parts in zip(whole, zip(*of_ranks, strict=True), strict=True):
        torch.testing.assert_close(sum(parts), alone, rtol=1e-4, atol=1e-6)
        assert alone.norm() > 1e-3


def test_speed_and_metrics_are_told_in_the_tasks_own_words(tmp_path):
    _, task, [report] = epoch_of(0, 1, micro_batch=8)
    words = task.counts(torch.arange(SENTENCES)).sum().item()
    assert report.totals["count"] == words
    scalars = report.scalars()
    assert list(scalars)[:2] == ["train/loss", "train/perplexity"]
    assert scalars["train/perplexity"] == pytest.approx(math.exp(scalars["train/loss"]))
    speeds = {"train/sentences_per_s", "train_by_rank/sentences_per_s_rank0"}
    assert {name for name in scalars if "per_s" in name} == speeds
    assert report.counts() == {"skipped_steps": 0, "loss_spikes": 0, "unreadable_sentences": 0}
    tracker = Tracker(tmp_path, is_writer=False, task=task, result={})
    assert {"best_perplexity", "train_sentences_per_s", "unreadable_sentences"} <= set(tracker.result)
    assert set(SHORTER) <= set(REMEDIES)


def test_a_fault_makes_the_loss_of_whole_numbers_nan():
    faults = Faults.parse({"HVDTRAIN_FAULT": "nan@rank0:step2"}, 0)
    [report] = epoch_of(0, 1, micro_batch=8, faults=faults, max_skipped_steps=2)[2]
    assert [(step, why.source) for step, why in report.skipped] == [(2, "loss")]
    assert report.steps == 3


def test_a_sum_that_only_tests_have_is_named():
    task = type("Classes", (Task,), {"means": ("accuracy",)})()
    assert "Classes: Sums.more lacks 'accuracy' in training" in refused(lambda: task.metrics({"loss": 1, "count": 2}))


def test_totals_of_which_one_has_a_name_that_the_other_lacks_are_added():
    assert added({"loss": 1.0, "count": 2.0}, {"count": 3.0}) == {"loss": 1.0, "count": 5.0}


def test_the_blocks_of_a_sequential_compute_what_it_computes():
    model, inputs = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)), torch.ones(4, 2)
    hidden = None
    for block in blocks_of(model).row:
        hidden = block.run(model, hidden, [inputs])
    assert torch.equal(hidden, model(inputs))
