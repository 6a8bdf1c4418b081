import math
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from hvdtrain.core.every_step import EveryStep
from hvdtrain.core.finite import Skipped, Spike
from hvdtrain.core.layout import Layout
from hvdtrain.core.model.modes import TrainingModes
from hvdtrain.core.pending import StepDone
from hvdtrain.core.phases import OFF
from hvdtrain.core.position import Position
from hvdtrain.insight.tracking.gauges import Gauges
from hvdtrain.loop import limits as limits_module
from hvdtrain.loop.evaluation import evaluate
from hvdtrain.loop.feed.feed import Feed, Resident
from hvdtrain.loop.feed.order import BatchSizes, permutation
from hvdtrain.loop.hooks import EpochDone
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Report, Reports
from hvdtrain.loop.save_points import Decision
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe.schedule import learning_rate
from hvdtrain.settings.safety.exits import TOO_MANY_SKIPPED, EndOfRun
from hvdtrain.tasks.vision.augment import Augmentations
from tests.ranks import Rank
from tests.refusals import require_facts
from tests.steps import CPU, conv_net, images_of, loop_of, rate_of, split, step_of, task_of
from tests.unit.loop.test_save_points import Counting
from tests.unit.loop.trainings import SMALL, begun

TRAIN, TEST = 53, 29


COUNTS = (10, 11, 10, 11, 11)  # of the batches of an epoch, with a global batch of 12
RATE = rate_of(1.0, 100, "cosine", batch=12.0, scaling="linear")


def random_images():
    return images_of(split(TRAIN, seed=1), split(TEST, seed=2))


def reports_of(comm, every_steps=1000, spikes=None):
    reports = Reports(comm, Gauges(dict), task_of(), every_steps=every_steps, device=CPU)
    reports.spikes = spikes or reports.spikes
    return reports


def sizes_of(global_batch, micro_batch):
    return BatchSizes(
        micro_batch=micro_batch, global_batch=global_batch, steps_per_epoch=math.ceil(TRAIN / global_batch)
    )


@dataclass
class FakePending:
    """In place of a Pending: notes that it is read, and how many steps have begun by then."""

    done: StepDone
    number: int
    calls: list
    reads: list

    def read(self):
        self.reads.append((self.number, len(self.calls)))
        return self.done


class Watching:
    """In place of a Step: keeps what it was given.

    An image has the loss 2, or what `losses` has for its call; the calls in `skips` are skipped.
    """

    phases = OFF

    def __init__(self, comm, *, losses=None, skips=None):
        self.model = conv_net().eval()
        self.modes = TrainingModes(self.model)
        self.comm, self.group, self.losses, self.skips = comm, comm, losses or {}, skips or {}
        self.slots = SimpleNamespace(comm=comm, when=EveryStep(), where=Layout())
        self.calls, self.reads = [], []
        self.scaler = GradScaler("cpu", enabled=False)

    def __call__(self, micro_batches, *, backward_passes, global_count, lr, measure=False):
        found = [(batch["images"], batch["labels"]) for batch in micro_batches]
        assert len(found) == backward_passes
        call = len(self.calls)
        self.calls.append({"found": found, "global_count": global_count, "lr": lr})
        count = sum(len(labels) for _, labels in found)
        loss = self.losses.get(call, 2.0) * count
        done = StepDone(
            totals={"loss": loss, "count": count, "right": count - (count > 0)},
            skipped=self.skips.get(call),
            grad_norm=float(call) if measure else math.nan,
        )
        return FakePending(done, call + 1, self.calls, self.reads)


def limits(max_skipped_steps=1000, check_replicas_every=0):
    return Limits(None, max_skipped_steps=max_skipped_steps, check_replicas_every=check_replicas_every)


def watch_epoch(
    rank=0,
    size=1,
    *,
    global_batch=12,
    micro_batch=5,
    epoch=0,
    labels=None,
    ends=None,
    spikes=None,
    step=None,
    every_steps=1000,
    **look,
):
    images = random_images()
    if labels is not None:
        images.train.tensors["labels"] = labels  # by which samples can be told apart
    step = step or Watching(Rank(rank, size))
    task = task_of(images, augmentations=Augmentations(**look), seed=7)
    loop = loop_of(
        step,
        Feed(images.train, task, step.comm.data, sizes_of(global_batch, micro_batch), seed=7, device=CPU),
        rate=RATE,
        limits=ends or limits(),
        reports=reports_of(step.comm, every_steps, spikes),
    )
    start = Position(step=epoch * math.ceil(TRAIN / global_batch), epoch=epoch)
    return step, list(loop.steps(start))


def test_each_sample_looks_the_same_whichever_rank_and_batch_it_is_in():
    def by_sample(ranks, **cut):
        looks = {"labels": torch.arange(TRAIN), "epoch": 3, "crop": True, "flip": True, "cutout": 6}
        steps = [watch_epoch(rank, ranks, **looks, **cut)[0] for rank in range(ranks)]
        found = [pair for step in steps for call in step.calls for pair in call["found"]]
        images, labels = zip(*found, strict=True)
        return torch.cat(images)[torch.cat(labels).argsort()]

    alone, shared = by_sample(1, global_batch=TRAIN, micro_batch=TRAIN), by_sample(3)
    assert torch.equal(alone, shared)


def test_reports_come_at_report_steps_and_at_the_end_of_an_epoch():
    losses, at = {call: float(call) for call in range(5)}, [6, 9, 10]
    step, reports = watch_epoch(step=Watching(Rank(0, 1), losses=losses), every_steps=3, epoch=1)
    assert [report.step for report in reports] == at
    for report, since in zip(reports, [5, *at], strict=False):
        steps = range(since - 5, report.step - 5)
        assert report.totals["loss"] == sum(losses[call] * COUNTS[call] for call in steps)
        assert report.totals["count"] == sum(COUNTS[call] for call in steps)
        assert report.lr == step.calls[steps[-1]]["lr"]
        assert report.grad_norm == steps[-1]
        assert report.loss_scale == 1.0
        assert report.steps == len(steps)
        assert report.units_per_s[0].item() > 0
    assert len(step.comm.summed) == len(at)


@pytest.mark.parametrize(
    ("options", "begun"),
    [
        ({}, [2, 3, 4, 5, 5]),  # the last step of an epoch reports
        ({"every_steps": 2}, [2, 2, 4, 4, 5]),
        ({"ends": {"max_skipped_steps": 1}}, [1, 2, 3, 4, 5]),
        ({"ends": {"max_skipped_steps": 2}}, [2, 3, 4, 4, 5]),  # after the third, skipped, one more would be the end
        ({"ends": {"check_replicas_every": 3}}, [2, 3, 3, 5, 5]),
    ],
)
def test_a_step_is_read_while_the_next_is_under_way_unless_something_depends_on_it(monkeypatch, options, begun):
    monkeypatch.setattr(limits_module, "check_replicas", lambda *_, **__: None)
    ends = limits(**options.get("ends", {}))
    skips = {2: LOSS_OF_2} if ends.needs_now(1) is False else {}
    step = Watching(Rank(0, 1), skips=skips)
    watch_epoch(step=step, **{**options, "ends": ends})
    assert step.reads == list(zip([1, 2, 3, 4, 5], begun, strict=True))


LOSS_OF_2, GRADIENTS_OF_0 = Skipped(rank=2, source="loss"), Skipped(rank=0, source="gradients")


def test_skipped_steps_are_reported_with_their_number_and_not_counted_in_the_means():
    skips, losses = {1: LOSS_OF_2, 4: GRADIENTS_OF_0}, {1: math.nan, 4: math.inf, 0: 3.0}
    step, [trained] = watch_epoch(epoch=2, step=Watching(Rank(0, 1), skips=skips, losses=losses))
    assert trained.skipped == [(12, LOSS_OF_2), (15, GRADIENTS_OF_0)]  # the numbers go on over epochs of 5 steps
    assert [values.tolist()[:3] for values in step.comm.summed] == [[3.0 * 10 + 2.0 * 21, 31, 31 - 3]]
    assert trained.metrics["loss"] == pytest.approx(72 / 31)
    assert (trained.spikes, trained.end) == ([], None)


def test_too_many_skipped_steps_end_the_epoch_early():
    step = Watching(Rank(0, 1), skips={0: LOSS_OF_2, 2: LOSS_OF_2, 3: GRADIENTS_OF_0})
    _, [trained] = watch_epoch(step=step, ends=limits(max_skipped_steps=2), epoch=1)
    assert len(step.calls) == 4
    assert trained.skipped == [(6, LOSS_OF_2), (8, LOSS_OF_2), (9, GRADIENTS_OF_0)]
    assert trained.end.status == TOO_MANY_SKIPPED == 3
    require_facts(str(trained.end), "2 steps in a row ... step 9: NaN or Inf ... the gradients of rank 0 ... --lr")
    assert [values.tolist()[:3] for values in step.comm.summed] == [[2.0 * 11, 11, 10]]  # the other ranks sum as well
    assert len(step.comm.said) == 2  # its host and the names of the gauges, before the epoch


class AtTheEnd(EveryStep):
    """Groups that are synchronized at the end of an epoch only."""

    def syncs_after(self, step, *, last):
        return step == last


def test_of_several_reasons_to_end_the_first_is_kept_until_all_are_synchronized():
    step = Watching(Rank(0, 1), skips={1: LOSS_OF_2, 2: GRADIENTS_OF_0})
    step.slots.when = AtTheEnd()
    _, [trained] = watch_epoch(step=step, ends=limits(max_skipped_steps=1))
    assert len(step.calls) == 5
    assert "step 2:" in str(trained.end)


def test_spikes_have_the_number_of_their_step_and_skipped_losses_are_not_seen():
    step = Watching(Rank(1, 2), losses={12: 90.0, 15: math.nan}, skips={15: LOSS_OF_2})
    _, [trained] = watch_epoch(1, 2, step=step, global_batch=2, epoch=1)  # 27 steps
    [spike] = trained.spikes
    assert spike == Spike(step=27 + 13, rank=1, loss=90.0, usual=2.0, samples=spike.samples)
    assert len(spike.samples) == 1
    assert [number for number, _ in trained.skipped] == [27 + 16]


def test_a_run_that_goes_on_trains_the_epochs_that_are_left():
    one = begun()
    parts = {"rate": one.lr, "limits": one.limits, "reports": one.reports, "test": one.images.test}
    loop = loop_of(one.step, one.feed, **parts, epochs=2, progress=Progress(Position(step=4, epoch=1)))
    assert [(type(item), item.step) for item in loop] == [(Report, 8), (EpochDone, 8)]


def test_a_run_of_so_many_steps_warms_up_and_falls_by_steps():
    """Of 5 steps an epoch."""
    images, step, max_steps, shares = random_images(), Watching(Rank(0, 1)), 12, []
    feed = Feed(images.train, task_of(images), step.comm, sizes_of(12, 12), seed=7, device=CPU)
    schedule = replace(SMALL, warmup_epochs=1.0, schedule="cosine")
    lr = learning_rate(schedule, samples=TRAIN, steps_per_epoch=5, max_steps=max_steps)
    for start in (Position(), Position(step=5, epoch=1), Position(step=10, epoch=2)):
        loop = loop_of(step, feed, rate=lr, limits=limits(), reports=reports_of(step.comm, 1), max_steps=max_steps)
        shares += [one.lr / lr.peak * lr.batch / step.calls[-1]["global_count"] for one in loop.steps(start)]
    falling = [0.5 * (1 + math.cos(math.pi * (number - 5) / (max_steps - 5))) for number in range(5, max_steps)]
    assert shares == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, *falling])


# --- limits


def stepping(comm, group=None):
    """A step of these ranks, of which those of the group step together."""
    return SimpleNamespace(slots=SimpleNamespace(comm=comm, where=None), group=group or comm, model=None)


def run_step(ends, number, skipped=None):
    ends.step_known(number, StepDone(totals={}, skipped=skipped))


def test_a_good_step_in_between_starts_the_count_anew():
    ends = limits(max_skipped_steps=3)
    ends.step = stepping(SerialComm())
    for number, skipped in enumerate([LOSS_OF_2, LOSS_OF_2, None] * 5, start=1):
        run_step(ends, number, skipped)


def test_samples_that_cannot_be_read_end_the_run_where_there_are_more_than_it_may_have():
    counts = {"unreadable_images": 4}
    ends = Limits(None, max_skipped_steps=9, check_replicas_every=0, most=dict(counts), counts=lambda: counts)
    decision = Decision(save=False, leave=False)
    ends.act_on(decision, Position())
    counts["unreadable_images"] = 5
    with pytest.raises(EndOfRun, match="5 images could not be decoded, more than the 4"):
        ends.act_on(decision, Position())


def test_all_ranks_are_compared_where_groups_meet_that_were_compared_each(monkeypatch):
    seen = []
    monkeypatch.setattr(limits_module, "check_replicas", lambda *by, **over: seen.append((by[3], not over)))
    ends, comm = limits(check_replicas_every=3), Rank(0, 4)
    ends.step = stepping(comm, Rank(0, 2))
    for step in range(1, 9):
        run_step(ends, step)
        if step % 2 == 0:
            ends.synced(step)
    assert seen == [(3, False), (4, True), (6, False), (6, True)]
    ends.step = stepping(comm)
    run_step(ends, 9)
    ends.synced(10)
    assert seen[4:] == [(9, False)]


def test_pictures_are_in_the_memory_format_of_the_model():
    task = task_of(memory_format=torch.channels_last)
    pictures = task.prepare(split(4).tensors, torch.arange(4), None)["images"]
    assert pictures.is_contiguous(memory_format=torch.channels_last)


def train_really():
    model = conv_net().eval()  # as an evaluation leaves it
    images = random_images()
    step = step_of(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9))
    feed = Feed(images.train, task_of(images), SerialComm(), sizes_of(12, 12), seed=0, device=CPU)
    for epoch in range(2):
        loop = loop_of(step, feed, rate=rate_of(0.1, 10, "cosine"), limits=limits(), reports=reports_of(SerialComm()))
        [report] = loop.steps(Position(step=epoch * math.ceil(TRAIN / 12), epoch=epoch))
    return step, report.metrics


def test_an_epoch_is_that_of_a_plain_loop_over_the_permutation():
    step, means = train_really()
    assert step.model.training
    assert step.evaluated is step.model
    plain = conv_net().train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    stored = random_images().train.tensors
    rate = rate_of(0.1, 10, "cosine")
    for epoch in range(2):
        loss_sum = right = visited = 0
        for chosen in permutation(TRAIN, seed=0, epoch=epoch).split(COUNTS):
            optimizer.param_groups[0]["lr"] = rate(5 * (epoch + visited / TRAIN), len(chosen))
            logits, labels = plain(stored["images"][chosen].float() / 255), stored["labels"][chosen]
            loss = functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            right += (logits.argmax(1) == labels).sum().item()
            visited += len(chosen)
    for one, other in zip(step.model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert means["loss"] == pytest.approx(loss_sum / TRAIN, rel=1e-4)
    assert means["accuracy"] == pytest.approx(right / TRAIN)


@pytest.mark.parametrize("size", [1, 3, 40])  # 40: some ranks have no image
def test_ranks_share_the_evaluation(size):
    step, _ = train_really()
    stored = random_images().test
    with torch.no_grad():
        logits = step.model.eval()(stored.tensors["images"].float() / 255)
    loss = functional.cross_entropy(logits, stored.tensors["labels"], reduction="sum").item()
    right = (logits.argmax(1) == stored.tensors["labels"]).sum().item()
    total = torch.zeros(4, dtype=torch.float64)
    for rank in range(size):
        step.slots.comm = Rank(rank, size, sums=torch.ones_like)
        evaluate(step, stored, 0, micro_batch=4)
        [summed] = step.slots.comm.summed
        total += summed
    assert total[0].item() == pytest.approx(loss, rel=1e-5)
    assert total[1:].tolist() == [TEST, right, 0]


def test_sets_of_a_test_have_their_own_metrics_and_the_first_has_plain_names():
    step, _ = train_really()
    stored, sets = random_images().test, {"near": range(3), "far": range(3, TEST)}
    parts = [{name: values[of.start : of.stop] for name, values in stored.tensors.items()} for of in sets.values()]
    near, far = (evaluate(step, Resident(**part), 0, micro_batch=4) for part in parts)
    both = evaluate(step, stored, 0, micro_batch=4, sets=sets)
    assert both == pytest.approx({**near, **{f"far/{name}": value for name, value in far.items()}})
    asked = []
    for rank in range(2):
        step.slots.comm, points = Rank(rank, 2), Counting()
        evaluate(step, stored, 0, micro_batch=2, sets=sets, save_points=points)
        asked.append(points.calls)
    assert asked[0] == asked[1] > 0


def test_evaluation_changes_no_statistics_and_averages_them_over_ranks():
    step, _ = train_really()
    step.slots.comm = Rank(0, 2)
    model = step.model
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(step, random_images().test, 0, micro_batch=8)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {id(one) for one in step.slots.comm.averaged} >= {id(model[1].running_mean), id(model[1].running_var)}


def test_an_evaluation_that_is_left_has_drawn_nothing():
    class Drawing(Layout):
        def evaluate(self, step, model, read):
            torch.rand(1)
            return super().evaluate(step, model, read)

    step, _ = train_really()
    step.slots.where, before = Drawing(), torch.get_rng_state()
    answers = iter([False, True])
    leaves = SimpleNamespace(decide=lambda _: lambda: Decision(save=False, leave=next(answers)))
    assert evaluate(step, random_images().test, 0, micro_batch=2, save_points=leaves) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(("images", "micro_batch", "times"), [(7, 3, 1), (8, 3, 2), (1, 4, 0)])
def test_all_ranks_ask_equally_often_whether_to_leave_an_evaluation(images, micro_batch, times):
    step, _ = train_really()
    asked = []
    for rank in range(2):
        step.slots.comm = Rank(rank, 2)
        points = Counting()
        evaluate(step, split(images), 0, micro_batch=micro_batch, save_points=points)
        asked.append(points.calls)
    assert asked == [times, times]
