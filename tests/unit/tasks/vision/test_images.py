import numpy as np
import pytest
import torch

from tests.refusals import refused
from tests.unit.tasks.vision.data_sets import load

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_digits_keep_their_labels_and_are_in_one_split_each(digits):
    from sklearn.datasets import load_digits

    bundle = load_digits()
    original = torch.from_numpy(bundle.images).float().flatten(1) / 16  # (1797, 64)
    images = torch.cat([digits.train.tensors["images"], digits.test.tensors["images"]])
    small = torch.nn.functional.avg_pool2d(images[:, 0].float() / 255, 4).flatten(1)  # back to 8 x 8, blurred
    nearest = torch.cdist(small - small.mean(1, keepdim=True), original - original.mean(1, keepdim=True)).argmin(1)
    labels = torch.cat([digits.train.tensors["labels"], digits.test.tensors["labels"]])
    assert torch.equal(labels, torch.from_numpy(bundle.target)[nearest])
    assert len(nearest.unique()) > 0.99 * len(nearest)  # blurring confuses a few


def test_mean_and_deviation_are_those_of_the_training_split(digits):
    values = digits.train.tensors["images"].double() / 255
    for channel in range(3):
        assert digits.mean[channel] == pytest.approx(values[:, channel].mean().item(), abs=1e-5)
        assert digits.std[channel] == pytest.approx(values[:, channel].std().item(), abs=1e-5)


def test_cifar10_pixels_and_labels_land_where_they_belong(cifar, tmp_path):
    cifar.write(tmp_path)
    images = load("cifar10", tmp_path)
    assert (len(images.train), len(images.test)) == (15, 10)
    assert (images.classes, images.height, images.is_mirrorable) == (10, 32, True)
    channel, row, column = np.indices((3, 32, 32))
    for split, names in ((images.train, sorted(cifar.rows)[:5]), (images.test, ["test_batch"])):
        flat = np.concatenate([cifar.rows[name] for name in names])
        expected = flat[:, 1024 * channel + 32 * row + column]  # red plane, green plane, blue plane, row by row
        assert split.tensors["images"].dtype == torch.uint8
        assert np.array_equal(split.tensors["images"].numpy(), expected)
        assert split.tensors["labels"].dtype == torch.int64
        assert split.tensors["labels"].tolist() == [label for name in names for label in cifar.labels[name]]


@pytest.mark.parametrize("name", ["data_batch_5", "test_batch", "batches.meta"])
@pytest.mark.parametrize("state", ["missing", "corrupt"])
def test_missing_or_corrupt_cifar10_file_is_named(cifar, tmp_path, name, state):
    path = cifar.write(tmp_path) / name
    if state == "missing":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    message = refused(lambda: load("cifar10", tmp_path))
    assert message.startswith(f"--data-dir {tmp_path}: {path} is {state}")
