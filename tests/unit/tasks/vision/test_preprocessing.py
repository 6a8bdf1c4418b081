from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.models import get_model_weights
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.v2 import functional

from hvdtrain.tasks.vision import models
from hvdtrain.tasks.vision.augment import normalise, scale_and_shift
from hvdtrain.tasks.vision.preprocessing import random_box
from tests.steps import CPU

SIZES = [(224, 224), (256, 256), (500, 375), (333, 501), (640, 200), (40, 30), (31, 97), (225, 1)]  # width, height


def jpeg(folder, width, height, mode="RGB"):
    """Coloured noise over a gradient, so that neither resizing nor a shift by a pixel goes unseen."""
    random = np.random.default_rng(width * height)
    slope = np.linspace(0, 200, width)[None, :, None] * np.ones((height, 1, 3))
    pixels = (slope + random.integers(0, 56, (height, width, 3))).astype(np.uint8)
    path = folder / f"{width}x{height}-{mode}.jpg"
    Image.fromarray(pixels).convert(mode).save(path, quality=90)
    return path


def both(path):
    """An image, and the same as a tensor."""
    with Image.open(path) as file:
        image = file.convert("RGB")
    return image, functional.pil_to_tensor(image)


@pytest.mark.parametrize("name", ["efficientnet_b0", "efficientnet_v2_s"])
def test_the_middle_is_what_the_models_own_transforms_give(tmp_path, name):
    """The pixels, resized by Pillow in both, bit for bit: a pixel that is off by 1 of 255 is off by 0.01 in the end."""
    ours, theirs = models.preprocessing(name), get_model_weights(name).DEFAULT.transforms()
    for (width, height), mode in [*product(SIZES, ["RGB"]), ((300, 200), "L"), ((300, 200), "CMYK")]:
        image, whole = both(jpeg(tmp_path, width, height, mode))
        pixels = ours.crop_middle(whole)
        assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, ours.crop, ours.crop))
        given = normalise(pixels[None], *scale_and_shift(ours.mean, ours.std, CPU))[0]
        torch.testing.assert_close(given, theirs(image), rtol=0, atol=1e-6, msg=f"{width} x {height} {mode}")


@pytest.mark.parametrize(("width", "height"), [(1, 100), (100, 1), (400, 6), (3, 100)])
def test_the_middle_of_a_thin_image_is_cut_out_before_it_is_resized(monkeypatch, width, height):
    ours = models.preprocessing("efficientnet_b0")
    random = np.random.default_rng(0)
    few = Image.fromarray(random.integers(0, 256, (max(1, height // 50), max(1, width // 50), 3), dtype=np.uint8))
    image = few.resize((width, height))
    whole = functional.resize(image, [ours.resize], interpolation=ours.interpolation)
    expected = functional.pil_to_tensor(functional.center_crop(whole, [ours.crop]))
    made, resize = [], Image.Image.resize
    monkeypatch.setattr(
        Image.Image, "resize", lambda self, size, *a, **k: made.append(max(size)) or resize(self, size, *a, **k)
    )
    middle = ours.crop_middle(functional.pil_to_tensor(image))
    assert max(made) <= 33 * ours.resize
    assert (middle.int() - expected.int()).abs().max() <= 2


def test_the_middle_of_a_line_of_millions_of_pixels_is_in_its_place():
    pixels = torch.zeros(3, 1, 2**24 + 1, dtype=torch.uint8)
    pixels[:, :, 2**23] = 255
    middle = models.preprocessing("efficientnet_b0").crop_middle(pixels)
    assert middle[0, 0, 111:113].min() > 250


@pytest.mark.parametrize(("width", "height"), SIZES)
def test_a_random_part_is_cut_and_resized_as_torchvision_does(tmp_path, width, height):
    preprocessing = models.preprocessing("efficientnet_b0")
    image, pixels = both(jpeg(tmp_path, width, height))
    part = preprocessing.crop_randomly(pixels, seed=1, epoch=2, sample=3)
    box = random_box(height, width, np.random.default_rng([1, 2, 2, 3]))
    expected = functional.resized_crop(
        pixels, *box, [224, 224], interpolation=preprocessing.interpolation, antialias=True
    )
    assert torch.equal(part, expected)
    by_pillow = functional.pil_to_tensor(
        functional.resized_crop(image, *box, [224, 224], interpolation=preprocessing.interpolation)
    )
    assert (part.int() - by_pillow.int()).abs().max() <= 2


def test_random_parts_are_spread_as_torchvisions(tmp_path):
    """Mean and deviation of area, shape and place over 4,000 draws, within four standard errors of a mean."""
    count, width, height = 4000, 500, 375
    ours = [random_box(height, width, np.random.default_rng([0, sample])) for sample in range(count)]
    torch.manual_seed(0)
    crop = RandomResizedCrop(224)
    theirs = [crop.get_params(torch.empty(3, height, width), crop.scale, crop.ratio) for _ in range(count)]

    def facts(boxes):
        top, left, h, w = np.array(boxes, dtype=float).T
        return np.stack([h * w / (height * width), np.log(w / h), top, left])

    for one, other in zip(facts(ours), facts(theirs), strict=True):
        error = other.std() / count**0.5
        assert abs(one.mean() - other.mean()) < 4 * 2**0.5 * error
        assert one.std() == pytest.approx(other.std(), rel=0.05)


@pytest.mark.parametrize(("width", "height"), [(1, 1), (1, 60), (1000, 2), (50, 400)])
def test_a_random_part_lies_inside_and_the_middle_is_taken_where_no_draw_fits(width, height):
    crop = RandomResizedCrop(224)
    for sample in range(50):
        top, left, h, w = random_box(height, width, np.random.default_rng(sample))
        assert 0 <= top <= top + h <= height
        assert 0 <= left <= left + w <= width
        assert h > 0
        assert w > 0
    if max(width, height) > 20 * min(width, height):  # none fits, so nothing is left to chance
        assert (top, left, h, w) == crop.get_params(torch.empty(3, height, width), crop.scale, crop.ratio)
