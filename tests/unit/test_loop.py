import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from hvdtrain import data, optim
from hvdtrain.comm import SerialComm
from hvdtrain.loop import Pictures, evaluate, train_epoch
from hvdtrain.schedule import LearningRate
from hvdtrain.step import StepDone, TrainingStep

CPU = torch.device("cpu")
TRAIN, TEST = 53, 29


class OneOf(SerialComm):
    """One rank of several that are not there; keeps what it gave to be summed or averaged."""

    def __init__(self, rank, size):
        self.rank, self.size = rank, size
        self.summed, self.averaged = [], []

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


class Watching:
    """In place of a TrainingStep: keeps what it was given."""

    def __init__(self):
        self.model = net().eval()
        self.calls = []

    def __call__(self, micro_batches, *, passes, global_count, lr):
        found = list(micro_batches)
        assert len(found) == passes
        self.calls.append({"found": found, "global_count": global_count, "lr": lr})
        count = sum(len(labels) for _, labels in found)
        return StepDone(loss_sum=torch.tensor(2.0 * count), right=torch.tensor(0.5 * count), skipped=passes == 1)


def watch_epoch(rank=0, size=1, *, global_batch=12, micro_batch=5, epoch=0, split=None, **look):
    images = random_images()
    if split is not None:
        images.train.labels = split  # labels by which samples can be told apart
    step, comm = Watching(), OneOf(rank, size)
    rate = LearningRate(peak=1.0, warmup_steps=0, total_steps=100, shape="cosine")
    means, skipped = train_epoch(
        step,
        images,
        pictures(**look),
        comm,
        epoch=epoch,
        seed=7,
        global_batch=global_batch,
        micro_batch=micro_batch,
        lr=rate,
        average=None,
        device=CPU,
    )
    return step, comm, means, skipped


def samples_of(step):
    return [label for call in step.calls for _, labels in call["found"] for label in labels.tolist()]


@pytest.mark.parametrize("size", [1, 2, 3])
def test_ranks_together_see_each_training_image_once(size):
    watched = [watch_epoch(rank, size, split=torch.arange(TRAIN))[0] for rank in range(size)]
    assert sorted(sample for step in watched for sample in samples_of(step)) == list(range(TRAIN))
    counts = {tuple(call["global_count"] for call in step.calls) for step in watched}
    assert counts == {(12, 12, 12, 12, 5)}
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


def test_means_and_skipped_steps_are_counted_per_image_and_step():
    step, comm, means, skipped = watch_epoch(1, 3)
    mine = len(samples_of(step))
    assert 17 <= mine <= 18
    assert [values.tolist() for values in comm.summed] == [[2.0 * mine, 0.5 * mine, mine]]  # one sum per epoch
    assert (means.loss, means.accuracy) == (2.0, 0.5)
    assert skipped == sum(len(call["found"]) == 1 for call in step.calls) > 0


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
        means, _ = train_epoch(
            step,
            images,
            pictures(),
            SerialComm(),
            epoch=epoch,
            seed=0,
            global_batch=12,
            micro_batch=12,
            lr=LearningRate(peak=0.1, warmup_steps=0, total_steps=10, shape="cosine"),
            average=average,
            device=CPU,
        )
    return model, average, means


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
    means = evaluate(model, random_images(), pictures(), SerialComm(), batch=batch, precision="fp32", device=CPU)
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
        evaluate(model, random_images(), pictures(), comm, batch=4, precision="fp32", device=CPU)
        assert len(comm.summed) == 1
        total += comm.summed[0]
    assert total[0].item() == pytest.approx(loss * TEST, rel=1e-5)
    assert total[1:].tolist() == [right, TEST]


def test_evaluation_changes_no_statistics_and_averages_them_over_ranks():
    model, comm = train_really()[0], OneOf(0, 2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, random_images(), pictures(), comm, batch=8, precision="fp32", device=CPU)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert {id(one) for one in comm.averaged} >= {id(model[1].running_mean), id(model[1].running_var)}


def test_evaluation_in_bf16_is_close_to_fp32():
    model = train_really()[0]
    loss, _ = directly(model)
    means = evaluate(model, random_images(), pictures(), SerialComm(), batch=8, precision="bf16", device=CPU)
    assert means.loss != pytest.approx(loss, rel=1e-6)
    assert means.loss == pytest.approx(loss, rel=0.02)
