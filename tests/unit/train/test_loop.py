import math
from dataclasses import dataclass

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.record.gauges import Gauges, none
from hvdtrain.safety.exits import REPLICAS_DIFFER, TOO_MANY_SKIPPED, EndOfRun
from hvdtrain.timing.phases import OFF
from hvdtrain.train import divergence, optim
from hvdtrain.train.divergence import Spike, SpikeWatch
from hvdtrain.train.loop import Limits, Pictures, Position, evaluate, train_epoch
from hvdtrain.train.reports import Reports, Totals
from hvdtrain.train.schedule import LearningRate
from hvdtrain.train.step import Skipped, StepDone, TrainingStep
from hvdtrain.vision import images as data

CPU = torch.device("cpu")
TRAIN, TEST = 53, 29


class OneOf(SerialComm):
    """One rank of several that are not there; keeps what it gave to be summed, averaged or gathered."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.summed, self.averaged, self.gathered = [], [], []

    def gather(self, value):
        self.gathered.append(value)
        return [value]

    def sum(self, values):
        self.summed.append(values.clone())
        return values

    def average_(self, tensors):
        self.averaged += tensors


def random_split(count, seed):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
    return data.Resident(images, torch.arange(count) % 10)


def random_images():
    return data.Images(
        train=random_split(TRAIN, 1),
        test=random_split(TEST, 2),
        classes=10,
        height=16,
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
        mirror=True,
    )


def pictures(**changes):
    plain = {"mean": torch.zeros(3), "std": torch.ones(3), "crop": False, "flip": False, "cutout": 0}
    return Pictures(**{**plain, "memory_format": torch.contiguous_format, **changes})


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


@dataclass
class Whole:
    """An epoch's reports, together."""

    reports: list

    @property
    def means(self):
        return sum((report.totals for report in self.reports), start=Totals()).means()

    @property
    def skipped(self):
        return [one for report in self.reports for one in report.skipped]

    @property
    def spikes(self):
        return [one for report in self.reports for one in report.spikes]

    @property
    def end(self):
        assert all(report.end is None for report in self.reports[:-1])
        return self.reports[-1].end


def reports_of(comm, every_steps=1000):
    return Reports(comm, Gauges(none), every_steps=every_steps, device=CPU)


class Watching:
    """In place of a TrainingStep: keeps what it was given.

    An image has the loss 2, or what `losses` has for its call; the calls in `skips` are skipped.
    """

    phases = OFF

    def __init__(self, comm, *, losses=None, skips=None):
        self.model = net().eval()
        self.comm, self.losses, self.skips = comm, losses or {}, skips or {}
        self.calls = []
        self.scaler = GradScaler("cpu", enabled=False)

    def __call__(self, micro_batches, *, passes, global_count, lr, measure=False):
        found = list(micro_batches)
        assert len(found) == passes
        call = len(self.calls)
        self.calls.append({"found": found, "global_count": global_count, "lr": lr})
        count = sum(len(labels) for _, labels in found)
        return StepDone(
            loss_sum=self.losses.get(call, 2.0) * count,
            right=count - (count > 0),
            skipped=self.skips.get(call),
            grad_norm=float(call) if measure else math.nan,
        )


def limits(max_skipped_steps=1000, check_replicas_every=0):
    return Limits(max_skipped_steps=max_skipped_steps, check_replicas_every=check_replicas_every)


def watch_epoch(
    rank=0,
    size=1,
    *,
    global_batch=12,
    micro_batch=5,
    epoch=0,
    split=None,
    ends=None,
    spikes=None,
    step=None,
    every_steps=1000,
    **look,
):
    images = random_images()
    if split is not None:
        images.train.labels = split  # labels by which samples can be told apart
    step = step or Watching(OneOf(rank, size))
    rate = LearningRate(peak=1.0, warmup_steps=0, total_steps=100, shape="cosine")
    trained = train_epoch(
        step,
        images,
        pictures(**look),
        start=Position(step=epoch * math.ceil(TRAIN / global_batch), epoch=epoch),
        seed=7,
        global_batch=global_batch,
        micro_batch=micro_batch,
        lr=rate,
        average=None,
        limits=ends or limits(),
        spikes=spikes or SpikeWatch(rank),
        reports=reports_of(step.comm, every_steps),
        device=CPU,
    )
    return step, Whole(list(trained))


def samples_of(step):
    return [label for call in step.calls for _, labels in call["found"] for label in labels.tolist()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_together_see_each_training_image_once(size):
    watched = [watch_epoch(rank, size, split=torch.arange(TRAIN))[0] for rank in range(size)]
    assert sorted(sample for step in watched for sample in samples_of(step)) == list(range(TRAIN))
    counts = {tuple(call["global_count"] for call in step.calls) for step in watched}
    assert counts == {(12, 12, 12, 12, 5)}
    passes = {tuple(len(call["found"]) for call in step.calls) for step in watched}
    assert passes == {tuple(math.ceil(math.ceil(count / size) / 5) for count in (12, 12, 12, 12, 5))}
    assert max(len(labels) for step in watched for call in step.calls for _, labels in call["found"]) <= 5


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("look", [{}, {"crop": True, "flip": True, "cutout": 6}])
def test_each_sample_looks_the_same_whichever_rank_and_batch_it_is_in(size, look):
    def by_sample(ranks, **cut):
        steps = [
            watch_epoch(rank, ranks, split=torch.arange(TRAIN), epoch=3, **look, **cut)[0] for rank in range(ranks)
        ]
        return {
            label: image
            for step in steps
            for call in step.calls
            for images, labels in call["found"]
            for label, image in zip(labels.tolist(), images, strict=True)
        }

    alone, shared = by_sample(1, global_batch=TRAIN, micro_batch=TRAIN), by_sample(size, global_batch=12)
    assert len(alone) == TRAIN
    assert all(torch.equal(alone[sample], shared[sample]) for sample in range(TRAIN))
    original = random_images().train.images.float() / 255
    changed = [not torch.equal(alone[sample], original[sample]) for sample in range(TRAIN)]
    assert all(changed) if look else not any(changed)


def test_order_and_augmentation_change_from_epoch_to_epoch():
    first, second = (watch_epoch(epoch=epoch, split=torch.arange(TRAIN))[0] for epoch in (0, 1))
    assert samples_of(first) != samples_of(second)
    images = [
        {
            label: one
            for call in step.calls
            for raw, of in call["found"]
            for label, one in zip(of.tolist(), raw, strict=True)
        }
        for step in (watch_epoch(epoch=epoch, split=torch.arange(TRAIN), crop=True)[0] for epoch in (0, 1))
    ]
    assert sum(torch.equal(images[0][sample], images[1][sample]) for sample in range(TRAIN)) < TRAIN / 4


def test_labels_stay_with_their_images():
    step = watch_epoch(2, 3)[0]
    split = random_images().train
    for call in step.calls:
        for images, labels in call["found"]:
            for image, label in zip(images, labels, strict=True):
                same = [index for index in range(TRAIN) if torch.equal(split.images[index].float() / 255, image)]
                assert [split.labels[index] for index in same] == [label]


def test_learning_rate_goes_on_over_epochs():
    rate = LearningRate(peak=1.0, warmup_steps=0, total_steps=100, shape="cosine")
    for epoch in (0, 2):
        step = watch_epoch(epoch=epoch)[0]
        assert [call["lr"] for call in step.calls] == [rate(5 * epoch + number) for number in range(5)]


def test_means_are_over_the_images_of_all_ranks():
    step, trained = watch_epoch(1, 3)
    mine = len(samples_of(step))
    assert 17 <= mine <= 18
    assert [values.tolist()[:3] for values in step.comm.summed] == [[2.0 * mine, mine - 5, mine]]  # one sum per epoch
    assert (trained.means.loss, trained.means.accuracy) == (2.0, (mine - 5) / mine)
    assert (trained.skipped, trained.spikes, trained.end) == ([], [], None)


@pytest.mark.parametrize(
    ("every", "epoch", "at"), [(1, 0, [1, 2, 3, 4, 5]), (2, 0, [2, 4, 5]), (2, 1, [6, 8, 10]), (3, 1, [6, 9, 10])]
)
def test_reports_come_at_report_steps_and_at_the_end_of_an_epoch(every, epoch, at):
    losses = {call: float(call) for call in range(5)}
    step, whole = watch_epoch(step=Watching(OneOf(0, 1), losses=losses), every_steps=every, epoch=epoch)
    assert [report.step for report in whole.reports] == at
    first = 5 * epoch
    counts = [12, 12, 12, 12, 5]
    for report, since in zip(whole.reports, [first, *at], strict=False):
        steps = range(since - first, report.step - first)
        assert report.totals.loss == sum(losses[call] * counts[call] for call in steps)
        assert report.totals.count == sum(counts[call] for call in steps)
        assert report.lr == step.calls[steps[-1]]["lr"]
        assert report.grad_norm == steps[-1]
        assert report.loss_scale == 1.0
        assert report.steps == len(steps)
        assert report.images_per_s[0] > 0
    assert len(step.comm.summed) == len(at)


def test_skipped_steps_and_spikes_are_in_the_report_of_their_steps():
    step = Watching(OneOf(0, 1), losses={13: 90.0}, skips={1: LOSS_OF_2, 15: GRADIENTS_OF_0})
    _, whole = watch_epoch(step=step, global_batch=3, micro_batch=3, every_steps=6)  # 18 steps
    assert [[number for number, _ in report.skipped] for report in whole.reports] == [[2], [], [16]]
    assert [[spike.step for spike in report.spikes] for report in whole.reports] == [[], [], [14]]


LOSS_OF_2, GRADIENTS_OF_0 = Skipped(rank=2, source="loss"), Skipped(rank=0, source="gradients")


def test_skipped_steps_are_reported_with_their_number_and_not_counted_in_the_means():
    skips = {1: LOSS_OF_2, 4: GRADIENTS_OF_0}
    found = [
        watch_epoch(epoch=epoch, step=Watching(OneOf(0, 1), skips=skips, losses={1: math.nan, 4: math.inf, 0: 3.0}))
        for epoch in (0, 2)
    ]
    assert [trained.skipped for _, trained in found] == [
        [(2, LOSS_OF_2), (5, GRADIENTS_OF_0)],
        [(12, LOSS_OF_2), (15, GRADIENTS_OF_0)],  # the numbers go on over epochs of 5 steps
    ]
    for step, trained in found:
        assert len(step.calls) == 5
        assert [values.tolist()[:3] for values in step.comm.summed] == [[3.0 * 12 + 2.0 * 24, 36 - 3, 36]]
        assert trained.means.loss == pytest.approx(84 / 36)
        assert (trained.spikes, trained.end) == ([], None)


def test_an_epoch_of_skipped_steps_has_no_means():
    step, trained = watch_epoch(step=Watching(OneOf(0, 1), skips=dict.fromkeys(range(5), LOSS_OF_2)))
    assert len(step.calls) == 5
    assert math.isnan(trained.means.loss)
    assert math.isnan(trained.means.accuracy)
    assert [number for number, _ in trained.skipped] == [1, 2, 3, 4, 5]
    assert trained.end is None


def test_too_many_skipped_steps_end_the_epoch_early():
    step = Watching(OneOf(0, 1), skips={0: LOSS_OF_2, 2: LOSS_OF_2, 3: GRADIENTS_OF_0})
    _, trained = watch_epoch(step=step, ends=limits(max_skipped_steps=2), epoch=1)
    assert len(step.calls) == 4
    assert trained.skipped == [(6, LOSS_OF_2), (8, LOSS_OF_2), (9, GRADIENTS_OF_0)]
    assert trained.end.status == TOO_MANY_SKIPPED == 3
    assert "step 9;" in str(trained.end)
    assert [values.tolist()[:3] for values in step.comm.summed] == [[2.0 * 12, 11, 12]]  # the other ranks sum as well
    assert len(step.comm.gathered) == 1  # the names of the gauges, before the epoch


def test_skipped_steps_in_a_row_are_counted_over_the_end_of_an_epoch():
    ends = limits(max_skipped_steps=3)
    _, first = watch_epoch(step=Watching(OneOf(0, 1), skips={3: LOSS_OF_2, 4: LOSS_OF_2}), ends=ends)
    step, second = watch_epoch(step=Watching(OneOf(0, 1), skips={0: LOSS_OF_2}), ends=ends, epoch=1)
    assert first.end is None
    assert second.end.status == TOO_MANY_SKIPPED
    assert len(step.calls) == 1


def test_replicas_that_differ_end_the_epoch_early(monkeypatch):
    seen = []

    def check(comm, model, number):
        seen.append((comm, model, number))
        if number == 4:
            raise EndOfRun("they differ", status=REPLICAS_DIFFER, reason="replicas differ")

    monkeypatch.setattr(divergence, "check_replicas", check)
    step, trained = watch_epoch(ends=limits(check_replicas_every=2))
    assert seen == [(step.comm, step.model, 2), (step.comm, step.model, 4)]
    assert len(step.calls) == 4
    assert (trained.end.status, trained.end.reason) == (4, "replicas differ")
    assert trained.means.loss == 2.0


def test_spikes_have_the_number_of_their_step_and_skipped_losses_are_not_seen():
    step = Watching(OneOf(1, 2), losses={12: 90.0, 15: math.nan}, skips={15: LOSS_OF_2})
    _, trained = watch_epoch(1, 2, step=step, global_batch=2, epoch=1)  # 27 steps
    assert trained.spikes == [Spike(step=27 + 13, rank=1, loss=90.0, usual=2.0)]
    assert [number for number, _ in trained.skipped] == [27 + 16]


class Seeing:
    """In place of a SpikeWatch."""

    def __init__(self):
        self.seen = []

    def see(self, step, loss):
        self.seen.append((step, loss))


def test_the_watch_sees_the_mean_loss_of_each_step_with_images():
    spikes = Seeing()
    watch_epoch(1, 3, step=Watching(OneOf(1, 3), losses={2: 7.0}), spikes=spikes)
    assert spikes.seen == [(1, 2.0), (2, 2.0), (3, 7.0), (4, 2.0), (5, 2.0)]
    spikes = Seeing()
    step, trained = watch_epoch(0, 2, global_batch=1, spikes=spikes)  # rank 0 gets no image of any
    assert spikes.seen == []
    assert [len(call["found"]) for call in step.calls] == [1] * TRAIN
    assert all(
        images.shape == (0, 3, 16, 16) and labels.shape == (0,)
        for [(images, labels)] in (call["found"] for call in step.calls)
    )
    assert math.isnan(trained.means.loss)  # the sum over ranks is made up here


def test_an_epoch_reports_the_spikes_of_all_ranks():
    theirs = {"step": 3, "rank": 2, "loss": 8.0, "usual": 1.0}
    step = Watching(OneOf(1, 3), losses={12: 90.0})
    step.comm.gather = lambda mine: [[], mine, [theirs] if mine else []]
    _, trained = watch_epoch(1, 3, step=step, global_batch=3, micro_batch=1)
    assert trained.spikes == [Spike(step=13, rank=1, loss=90.0, usual=2.0), Spike(**theirs)]


# --- limits


def after_steps(ends, outcomes, comm=None):
    for number, skipped in enumerate(outcomes, start=1):
        ends.after_step(comm or SerialComm(), None, number, skipped)


@pytest.mark.parametrize("most", [1, 2, 5])
def test_so_many_skipped_steps_in_a_row_end_the_run(most):
    ends = limits(max_skipped_steps=most)
    after_steps(ends, [None, *[GRADIENTS_OF_0] * (most - 1)])
    with pytest.raises(EndOfRun) as end:
        ends.after_step(SerialComm(), None, most + 1, LOSS_OF_2)
    assert (end.value.status, end.value.reason) == (3, "too many skipped steps")
    message = str(end.value)
    assert "\n" not in message
    assert message.startswith(f"{most} steps in a row were not finite, up to step {most + 1}; the loss of rank 2 first")
    assert "--lr" in message


def test_a_good_step_in_between_starts_the_count_anew():
    after_steps(limits(max_skipped_steps=3), [LOSS_OF_2, LOSS_OF_2, None] * 5)


@pytest.mark.parametrize(("every", "checked"), [(0, []), (1, [1, 2, 3, 4, 5, 6, 7]), (3, [3, 6]), (8, [])])
def test_replicas_are_checked_at_multiples(monkeypatch, every, checked):
    seen = []
    monkeypatch.setattr(divergence, "check_replicas", lambda comm, model, step: seen.append((comm, model, step)))
    comm = SerialComm()
    after_steps(limits(check_replicas_every=every), [None, None, LOSS_OF_2, None, LOSS_OF_2, LOSS_OF_2, None], comm)
    assert seen == [(comm, None, step) for step in checked]


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_pictures_are_normalised_and_in_their_memory_format(memory_format):
    mean, std = torch.tensor([0.1, 0.2, 0.3]), torch.tensor([0.5, 0.25, 2.0])
    look = pictures(mean=mean, std=std, memory_format=memory_format)
    raw = random_split(4, 1).images
    out = look.for_evaluation(raw)
    torch.testing.assert_close(out, (raw.float() / 255 - mean.view(3, 1, 1)) / std.view(3, 1, 1))
    assert out.is_contiguous(memory_format=memory_format)


def train_really(*, average_steps=None):
    model = net().eval()  # as an evaluation leaves it
    step = TrainingStep(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9),
        comm=SerialComm(),
        sync=SerialComm().gradient_sync(model, compression="none"),
        scaler=GradScaler("cpu", enabled=False),
        precision="fp32",
        label_smoothing=0.0,
        clip_value=None,
        clip_norm=None,
    )
    average = optim.moving_average(model, horizon_steps=average_steps) if average_steps else None
    images = random_images()
    for epoch in range(2):
        trained = train_epoch(
            step,
            images,
            pictures(),
            start=Position(step=epoch * math.ceil(TRAIN / 12), epoch=epoch),
            seed=0,
            global_batch=12,
            micro_batch=12,
            lr=LearningRate(peak=0.1, warmup_steps=0, total_steps=10, shape="cosine"),
            average=average,
            limits=limits(),
            spikes=SpikeWatch(0),
            reports=reports_of(SerialComm()),
            device=CPU,
        )
        whole = Whole(list(trained))
    return model, average, whole.means


def test_the_moving_average_follows_every_step():
    model, average, _ = train_really(average_steps=50.0)
    assert average.n_averaged == 10
    assert not torch.equal(average.module[0].weight, model[0].weight)


def test_an_epoch_is_that_of_a_plain_loop_over_the_permutation():
    model, _, means = train_really()
    assert model.training
    plain = net().train()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    split = random_images().train
    rate = LearningRate(peak=0.1, warmup_steps=0, total_steps=10, shape="cosine")
    number = 0
    for epoch in range(2):
        loss_sum = right = 0
        for chosen in data.permutation(TRAIN, seed=0, epoch=epoch).split(12):
            optimizer.param_groups[0]["lr"] = rate(number)
            logits, labels = plain(split.images[chosen].float() / 255), split.labels[chosen]
            loss = functional.cross_entropy(logits, labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            loss_sum += loss.item() * len(labels)
            right += (logits.argmax(1) == labels).sum().item()
            number += 1
    for one, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)
    assert means.loss == pytest.approx(loss_sum / TRAIN, rel=1e-4)
    assert means.accuracy == pytest.approx(right / TRAIN)


def directly(model):
    split = random_images().test
    with torch.no_grad():
        logits = model.eval()(split.images.float() / 255)
    return functional.cross_entropy(logits, split.labels).item(), (logits.argmax(1) == split.labels).sum().item()


@pytest.mark.parametrize("batch", [1, 7, TEST, 100])
def test_evaluation_counts_each_image_once(batch):
    model = train_really()[0]
    loss, right = directly(model)
    model.train()
    means = evaluate(
        model, random_images(), pictures(), SerialComm(), batch=batch, precision="fp32", device=CPU, step=0
    )
    assert means.accuracy == right / TEST
    assert means.loss == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("size", [2, 3, 40])  # 40: some ranks have no image
def test_ranks_share_the_evaluation(size):
    model = train_really()[0]
    loss, right = directly(model)
    total = torch.zeros(3, dtype=torch.float64)
    for rank in range(size):
        comm = OneOf(rank, size)
        comm.sum = lambda values, comm=comm: comm.summed.append(values) or torch.ones(3)
        evaluate(model, random_images(), pictures(), comm, batch=4, precision="fp32", device=CPU, step=0)
        assert len(comm.summed) == 1
        total += comm.summed[0]
    assert total[0].item() == pytest.approx(loss * TEST, rel=1e-5)
    assert total[1:].tolist() == [right, TEST]


def test_evaluation_changes_no_statistics_and_averages_them_over_ranks():
    model, comm = train_really()[0], OneOf(0, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, random_images(), pictures(), comm, batch=8, precision="fp32", device=CPU, step=0)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {id(one) for one in comm.averaged} >= {id(model[1].running_mean), id(model[1].running_var)}


def test_evaluation_in_bf16_is_close_to_fp32():
    model = train_really()[0]
    loss, _ = directly(model)
    means = evaluate(model, random_images(), pictures(), SerialComm(), batch=8, precision="bf16", device=CPU, step=0)
    assert means.loss != pytest.approx(loss, rel=1e-6)
    assert means.loss == pytest.approx(loss, rel=0.02)
