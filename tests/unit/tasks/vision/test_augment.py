import pytest
import torch
from torch.nn.functional import pad

from hvdtrain.tasks.vision.augment import (
    Augmentations,
    Noise,
    crop_and_flip,
    cutout,
    draw_noise,
    normalise,
    scale_and_shift,
)

CPU = torch.device("cpu")


def pixels(count=6, height=16):
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 256, (count, 3, height, height), dtype=torch.uint8, generator=generator)


def noise(samples=50, *, height=32, seed=3, epoch=1):
    return draw_noise(samples, height=height, seed=seed, epoch=epoch, device=CPU)


@pytest.mark.parametrize("kind", ["shift", "flip", "hole"])
def test_noise_repeats_and_differs_by_seed_and_epoch(kind):
    first = getattr(noise(), kind)
    assert torch.equal(first, getattr(noise(), kind))
    assert not torch.equal(first, getattr(noise(seed=4), kind))
    assert not torch.equal(first, getattr(noise(epoch=2), kind))
    assert not torch.equal(first, getattr(noise(seed=1, epoch=3), kind))  # swapped


def test_noise_takes_all_its_values_and_no_others():
    drawn = noise(5000)
    assert drawn.shift.shape == drawn.hole.shape == (5000, 2)
    for column in range(2):
        assert drawn.shift[:, column].unique().tolist() == list(range(9))  # 0 to twice 4
        assert drawn.hole[:, column].unique().tolist() == list(range(32))
    assert 0.45 < drawn.flip.float().mean() < 0.55


@pytest.mark.parametrize("width", [16, 12])
@pytest.mark.parametrize("flipped", [None, [1, 0, 0, 1, 1, 0, 1, 0, 1]])
def test_a_crop_equals_a_loop_over_padded_images(flipped, width):
    images = pixels(9)[..., :width]
    shift = torch.tensor([[0, 0], [4, 4], [2, 2], [0, 4], [4, 0], [1, 3], [3, 1], [2, 0], [0, 1]])
    expected = torch.stack(
        [
            pad(image, (2, 2, 2, 2))[:, row : row + 16, column : column + width]
            for image, (row, column) in zip(images, shift.tolist(), strict=True)
        ]
    )
    flip = None
    if flipped is not None:  # after the crop
        flip = torch.tensor(flipped, dtype=torch.bool)
        expected[flip] = expected[flip].flip(-1)
    cropped = crop_and_flip(images, shift, flip)
    assert torch.equal(cropped, expected)
    assert cropped.dtype == torch.uint8
    assert torch.equal(cropped[2], images[2])  # the middle shift changes nothing


@pytest.mark.parametrize(("crop", "flip"), [(True, True), (True, False), (False, True), (False, False)])
def test_images_are_changed_as_was_chosen(crop, flip):
    images = pixels(4)
    every = torch.ones(4, dtype=torch.int64)
    changes = Noise(shift=torch.full((4, 2), 4), flip=every.bool(), hole=every)
    expected = pad(images, (0, 2, 0, 2))[:, :, 2:, 2:] if crop else images
    found = Augmentations(crop=crop, flip=flip)(images, changes)
    assert torch.equal(found, expected.flip(-1) if flip else expected)


@pytest.mark.parametrize("size", [1, 4, 5, 40])
def test_cutout_equals_a_loop_clipped_at_the_border(size):
    holes = [[8, 8], [0, 0], [15, 15], [0, 15], [7, 1], [14, 3]]
    images = pixels(len(holes))
    expected = images.clone()
    for image, (row, column) in zip(expected, holes, strict=True):
        top, left = row - size // 2, column - size // 2
        image[:, max(0, top) : max(0, top + size), max(0, left) : max(0, left + size)] = 0
    assert torch.equal(cutout(images, torch.tensor(holes), size), expected)


def test_normalise_subtracts_mean_and_divides_by_deviation_of_each_channel():
    images = torch.tensor([0, 51, 255], dtype=torch.uint8)[None, :, None, None].expand(2, 3, 4, 4)
    out = normalise(images, *scale_and_shift([0.5, 0.1, 0.0], [0.25, 0.1, 2.0], CPU))
    assert out.dtype == torch.float32
    assert out.shape == (2, 3, 4, 4)
    for channel, value in enumerate([-2.0, 1.0, 0.5]):
        assert torch.allclose(out[:, channel], torch.tensor(value))
