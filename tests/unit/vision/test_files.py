import numpy as np
import pytest
import torch

from hvdtrain.vision.files import _collated
from hvdtrain.vision.images import NO_LABEL
from tests.refusals import refused
from tests.steps import CPU
from tests.unit.vision.data_sets import load, write_image


@pytest.mark.parametrize("count", [0, 1, 3])
def test_collated_samples_are_stacked_and_none_are_an_empty_batch(count):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=generator)
    batch = _collated([(images[number], 10 + number) for number in range(count)], height=8)
    raw, labels = batch["images"], batch["labels"]
    assert (raw.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(raw, images[:count])
    assert labels.tolist() == [10, 11, 12][:count]


def test_image_folder_decodes_in_workers_and_names_a_truncated_file(tmp_path):
    square = write_image(tmp_path / "train" / "cat" / "a.png", seed=1)
    wide = write_image(tmp_path / "train" / "cat" / "b.png", width=12, seed=2)
    gray = write_image(tmp_path / "train" / "dog" / "c.png", seed=3, mode="L")
    write_image(tmp_path / "train" / "dog" / "d.png", height=64, width=64, seed=4)
    for name in ("cat", "dog"):
        write_image(tmp_path / "val" / name / "e.png", seed=5)
    truncated = tmp_path / "train" / "dog" / "d.png"
    truncated.write_bytes(truncated.read_bytes()[:4000])

    images = load("imagefolder", tmp_path)
    assert (len(images.train), len(images.test)) == (4, 2)
    assert (images.classes, images.height, images.mirror) == (2, 8, True)
    assert images.mean == (0.485, 0.456, 0.406)
    expected = [
        square.transpose(2, 0, 1),
        wide[:, 2:10].transpose(2, 0, 1),  # the centre
        np.stack([gray] * 3),
    ]
    for lists in ([[2, 0], [], [1]], [[1, 2, 0], []]):  # two epochs through the same workers
        found = list(images.train.batches([torch.tensor(places, dtype=torch.int64) for places in lists], CPU))
        for batch, wanted in zip(found, lists, strict=True):
            raw, labels = batch["images"], batch["labels"]
            assert (raw.dtype, labels.dtype) == (torch.uint8, torch.int64)
            assert raw.shape == (len(wanted), 3, 8, 8)
            assert np.array_equal(raw.numpy(), np.array([expected[index] for index in wanted]).reshape(raw.shape))
            assert labels.tolist() == [[0, 0, 1][index] for index in wanted]
    [batch] = images.train.batches([torch.tensor([0, 3])], CPU)
    raw, labels = batch["images"], batch["labels"]
    assert labels.tolist() == [0, NO_LABEL]
    assert np.array_equal(raw[0].numpy(), expected[0])
    assert not raw[1].any()


def test_class_folders_without_train_are_split_80_to_20_the_same_each_time(tmp_path):
    for number in range(20):
        write_image(tmp_path / ("cat", "dog")[number % 2] / f"{number}.png", seed=number)
    images, again = load("imagefolder", tmp_path), load("imagefolder", tmp_path)
    train, test = images.train.samples, images.test.samples
    assert (len(train), len(test)) == (16, 4)
    assert (train, test) == (again.train.samples, again.test.samples)
    assert {path for path, _ in train + test} == {str(path) for path in tmp_path.glob("*/*.png")}
    assert all(label == ("/dog/" in path) for path, label in train + test)
    assert {label for _, label in train} == {0, 1}  # shuffled, not cut by class


def test_missing_image_folder_is_named(tmp_path):
    message = refused(lambda: load("imagefolder", tmp_path / "none"))
    assert message.startswith(f"--data-dir {tmp_path / 'none'}: ")


def test_empty_image_folder_is_named(tmp_path):
    assert refused(lambda: load("imagefolder", tmp_path)).startswith(f"--data-dir {tmp_path}: not a folder of class")


def test_class_folder_without_images_is_named(tmp_path):
    write_image(tmp_path / "cat" / "a.png")
    (tmp_path / "dog").mkdir()
    message = refused(lambda: load("imagefolder", tmp_path))
    assert message.startswith(f"--data-dir {tmp_path}: ")
    assert "dog" in message


def test_train_without_val_is_refused(tmp_path):
    write_image(tmp_path / "train" / "cat" / "a.png")
    assert str(tmp_path / "val") in refused(lambda: load("imagefolder", tmp_path))


def test_class_in_only_one_of_train_and_val_is_named(tmp_path):
    for part, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "emu")):
        write_image(tmp_path / part / name / "a.png")
    message = refused(lambda: load("imagefolder", tmp_path))
    assert message == f"--data-dir {tmp_path}: class 'dog' is in only one of train/ and val/"


@pytest.mark.parametrize("part", ["train", "val"])
@pytest.mark.parametrize("content", [b"hello, I am text", b"", b"\x89PNG\r\n\x1a\n"])
def test_file_that_is_no_image_is_named(tmp_path, part, content):
    for split in ("train", "val"):
        write_image(tmp_path / split / "cat" / "a.png")
    broken = tmp_path / part / "cat" / "b.png"
    broken.write_bytes(content)
    assert f"{broken} is not a readable image" in refused(lambda: load("imagefolder", tmp_path))


def test_ranks_share_the_check_of_the_files(tmp_path):
    for name in ("a", "b", "c"):
        write_image(tmp_path / "cat" / f"{name}.png")
    broken = tmp_path / "cat" / "b.png"
    broken.write_bytes(b"text")
    assert str(broken) in refused(lambda: load("imagefolder", tmp_path, rank=1, size=2))
    assert load("imagefolder", tmp_path, rank=0, size=2).classes == 1
