from dataclasses import replace

import pytest
import torch

from hvdtrain.core.task import UNREADABLE, total
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.tasks.vision import settings as vision_settings
from hvdtrain.tasks.vision.data import load_on_all
from hvdtrain.tasks.vision.images import NO_LABEL
from hvdtrain.tasks.vision.task import image_task
from tests.steps import CPU, images_of, split, task_of

DIGITS = replace(vision_settings.scaled(), data="digits", model="efficientnet_tiny", batch_size_per_rank=64)


@pytest.fixture(scope="module")
def digits():
    return load_on_all(SerialComm(), DIGITS)


@pytest.mark.parametrize(
    ("augment", "crop", "side"), [("standard", True, 0), ("cutout:5", True, 5), ("none", False, 0)]
)
def test_digits_are_cropped_but_never_mirrored(digits, augment, crop, side):
    task = image_task(replace(DIGITS, augment=augment), digits, CPU)
    chosen = task.augmentations
    assert (chosen.crop, chosen.flip, chosen.cutout) == (crop, False, side)
    assert task.mean == digits.mean
    assert task.std == digits.std
    plain = image_task(replace(DIGITS, normalize=False), digits, CPU)
    assert (plain.mean, plain.std) == ((0.0,) * 3, (1.0,) * 3)
    assert image_task(DIGITS, replace(digits, is_mirrorable=True), CPU).augmentations.flip is True


def test_files_that_are_cropped_as_they_are_read_are_only_mirrored_afterwards(digits):
    files = replace(digits, is_mirrorable=True, is_cropped=True)
    chosen = image_task(replace(DIGITS, augment="cutout:5"), files, CPU).augmentations
    assert (chosen.crop, chosen.flip, chosen.cutout) == (False, True, 5)
    plain = image_task(replace(DIGITS, augment="none"), files, CPU).augmentations
    assert (plain.crop, plain.flip) == (False, False)


def test_images_are_normalised_to_mean_0_and_deviation_1(digits):
    task = image_task(DIGITS, digits, CPU)
    values = task.prepare(digits.train.tensors, torch.arange(len(digits.train)), None)["images"]
    assert values.mean((0, 2, 3)).tolist() == pytest.approx([0.0] * 3, abs=1e-4)
    assert values.std((0, 2, 3)).tolist() == pytest.approx([1.0] * 3, abs=1e-4)


def test_images_that_could_not_be_decoded_weigh_nothing_and_are_counted():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [9.0, 0.0]])
    batch = {"images": torch.zeros(3, 3, 2, 2), "labels": torch.tensor([0, 0, NO_LABEL])}
    names, values = total([task_of().loss(lambda _: logits, batch, training=True)])
    sums = dict(zip(names, values.tolist(), strict=True))
    own = torch.nn.functional.cross_entropy(logits[:2], batch["labels"][:2], reduction="sum").item()
    assert sums == {"loss": pytest.approx(own), "count": 2.0, "right": 1.0, UNREADABLE: 1.0}
    assert task_of().metrics(sums) == {"loss": pytest.approx(own / 2), "accuracy": 0.5}


def test_noise_is_drawn_anew_for_each_epoch_and_is_the_same_when_an_epoch_comes_again():
    images = images_of(split(40), split(4))
    options = task_of(images).augmentations.__class__(crop=True, flip=True)
    task = task_of(images, augmentations=options, seed=3)

    def seen(epoch):
        samples = torch.arange(40)
        return task.prepare(images.train.tensors, samples, epoch)["images"]

    first, second, again = seen(0), seen(1), seen(0)
    assert not torch.equal(first, second)
    assert torch.equal(first, again)
