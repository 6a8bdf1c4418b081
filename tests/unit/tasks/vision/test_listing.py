import io
import os
import re
from multiprocessing.reduction import ForkingPickler

import pytest
from torchvision.datasets import ImageFolder

from hvdtrain.tasks.vision.listing import list_images
from tests.refusals import refused, require_facts


def put(path, content=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def files(listing):
    return [(listing.path(image), int(listing.labels[image])) for image in range(len(listing))]


def test_classes_and_images_are_torchvisions_in_its_order(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for name in ("dog/b.png", "dog/a.JPEG", "dog/B.jpg", "dog/sub/c.webp", "dog/sub-1/d.bmp", "dog/notes.txt"):
        put(data / name)
    for name in ("Emu/1.png", "Emu/10.png", "Emu/2.png", "Emu/.0.png", "Emu/with space\n.png", "Emu/ü.png"):
        put(data / name)
    put(elsewhere / "deep" / "e.tiff")
    put(data / "readme.png")  # in no class
    put(data / os.fsdecode(b"Emu/\xff.png"))
    (data / "cat").symlink_to(elsewhere)
    (data / "Emu" / "3.png").symlink_to(data / "dog" / "b.png")
    (data / "Emu" / "4.png").symlink_to(data / "nowhere")
    expected = [sample for sample in ImageFolder(data).samples if not sample[0].endswith("/.0.png")]  # of a Mac
    assert files(list_images(data)) == expected
    assert list_images(data).classes == 3


def test_training_images_come_before_those_of_the_test(tmp_path):
    for name in ("train/cat/a.png", "train/dog/b.png", "train/dog/c.png", "val/cat/d.png", "val/dog/e.png"):
        put(tmp_path / name)
    found = list_images(tmp_path)
    expected = ImageFolder(tmp_path / "train").samples, ImageFolder(tmp_path / "val").samples
    assert [[files(found)[image] for image in split.tolist()] for split in found.splits] == list(expected)
    assert files(found) == [*expected[0], *expected[1]]


def test_class_folders_without_train_are_split_80_to_20_the_same_each_time(tmp_path):
    for number in range(20):
        put(tmp_path / ("cat", "dog")[number % 2] / f"{number}.png")
    found, again = list_images(tmp_path), list_images(tmp_path)
    train, test = found.splits
    assert (len(train), len(test)) == (16, 4)
    assert [one.tolist() for one in found.splits] == [one.tolist() for one in again.splits]
    assert sorted([*train.tolist(), *test.tolist()]) == list(range(20))
    assert {int(label) for label in found.labels[train]} == {0, 1}  # shuffled, not cut by class


def test_a_worker_is_sent_the_place_in_memory_and_no_names(tmp_path):
    for number in range(500):
        put(tmp_path / "cat" / f"{'long' * 20}-{number}.png")
    put(tmp_path / "dog" / "a.png")
    sent = io.BytesIO()
    ForkingPickler(sent).dump(list_images(tmp_path))
    assert sent.tell() < 4000


def test_missing_or_empty_folder_is_named(tmp_path):
    assert refused(lambda: list_images(tmp_path / "none")).startswith(f"--data-dir {tmp_path / 'none'}: ")
    assert refused(lambda: list_images(tmp_path)).startswith(f"--data-dir {tmp_path}: not a folder of class")


def test_class_folder_without_images_is_named(tmp_path):
    put(tmp_path / "cat" / "a.png")
    put(tmp_path / "dog" / "a.txt")
    message = refused(lambda: list_images(tmp_path))
    assert message.startswith(f"--data-dir {tmp_path}: ")
    assert "for the classes dog; images are .jpg, " in message


def used(folder):
    """What a listing says of its files, from the first split on."""
    return list_images(folder).usage.removeprefix(f"--data-dir {folder}: ")


@pytest.mark.parametrize(
    ("names", "usage"),
    [
        ("seg_train/A/1 seg_test/A/2 seg_pred/3", "seg_train/ (1 ... seg_test/ (1 ... not used: 1 in seg_pred/"),
        ("d/d/train/d/A/1 d/d/train/d/B/1 d/d/val/A/2 d/d/val/B/2", "is d/d/train/d/ (2 ... is d/d/val/ (2"),
        (
            "train/A/1 train/B/1 val/A/2 val/B/2 test/3",
            "test is val/ (2 ... 1 in test/, which has no folders of the classes",
        ),
        ("train/A/1 val/A/2 test/A/3", "test is test/ (1 ... not used: 1 in val/, since one split is enough"),
        (
            "train/A/1 train/B/2 val/3 val/4",
            "test is a fifth of these (0 images) ... not used: 2 in val/, which has no",
        ),
        ("train/A/1 test/test/2 pred/3", "a fifth of these ... not used: 1 in test/, which has no folders of"),
        (
            "A/1 B/2 3 .ipynb_checkpoints/1 A/.ipynb_checkpoints/1 A/._1 __MACOSX/A/1",
            "used: 2, not used: 1 in no class",
        ),
    ],
)
def test_splits_are_found_by_names_as_people_write_them_and_all_files_are_counted(tmp_path, names, usage):
    for name in names.split():
        put(tmp_path / f"{name}.png")
    require_facts(used(tmp_path), usage)
    assert len(list_images(tmp_path)) + sum(
        map(int, re.findall(r"(?<=[,:] )\d+(?= (?:in|hidden))", used(tmp_path)))
    ) == len(names.split())


@pytest.mark.parametrize(
    ("names", "facts"),
    [
        ("bus/1 car/2 train/3 test/4", "either 'train' for training, and nothing of 'bus', 'car', or"),
        ("train/1 test/2", "has no class folders. Sort its images into"),
        ("treino/A/1 treino/B/2 treino/C/5 teste/A/3 teste/B/4 treino/6", "as splits with the classes 'A', 'B', or"),
        ("fold1/A/1 fold1/B/2 fold2/A/3 fold2/B/4", "either 'fold1', 'fold2' as splits with the classes 'A', 'B', or"),
    ],
)
def test_folders_with_two_readings_are_refused_with_both(tmp_path, names, facts):
    for name in names.split():
        put(tmp_path / f"{name}.png")
    message = refused(lambda: list_images(tmp_path))
    require_facts(message, f"--data-dir {tmp_path}: ... {facts}")


def test_images_of_all_kinds_are_used_and_other_files_are_counted_by_ending(tmp_path):
    for name in ("a.jfif", "b.GIF", "c.avif", "d.jpe", "e.JP2", "labels.csv", "f.heic", "Thumbs.db", "README"):
        put(tmp_path / "cat" / name)
    assert len(list_images(tmp_path)) == 5
    facts = (
        "files used: 5, not used: 1 without an ending, 1 hidden or of the system, 1 with the ending .heic, 1 with the"
    )
    require_facts(used(tmp_path), facts)


def test_a_folder_that_is_linked_twice_is_read_once(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for name in ("cat/1.png", "dog/2.png"):
        put(data / name)
    put(elsewhere / "deep" / "3.png")
    (data / "cat" / "all").symlink_to(data)  # without an end
    (data / "dog" / "newest").symlink_to(data / "cat")  # the same image with two labels
    (data / "newest").symlink_to(data / "dog")
    (data / "dog" / "more").symlink_to(elsewhere)
    (elsewhere / "deep" / "again").symlink_to(elsewhere)
    (data / "itself").symlink_to("itself")
    found = list_images(data)
    names = [path.removeprefix(f"{data}/") for path, _ in files(found)]
    assert (names, found.classes) == (["cat/1.png", "dog/2.png", "dog/more/deep/3.png"], 2)
    require_facts(found.usage, "not used: 1 linked to nothing, 4 linked twice")
    (data / "val").symlink_to("not mounted")
    require_facts(refused(lambda: list_images(data)), f"{data}/val: a link to nothing, by its name a split")


def test_each_class_has_a_fifth_for_the_test_and_a_single_image_is_for_training(tmp_path):
    for name, count in {"cat": 10, "dog": 3, "owl": 1}.items():
        for number in range(count):
            put(tmp_path / name / f"{number}.png")
    found = list_images(tmp_path)
    assert [found.labels[split].bincount(minlength=3).tolist() for split in found.splits] == [[8, 2, 1], [2, 1, 0]]


@pytest.mark.parametrize("names", ["cat emu", "Cat Dog"])
def test_class_in_only_one_of_train_and_val_is_named(tmp_path, names):
    for part, name in (("train", "cat"), ("train", "dog"), *(("val", name) for name in names.split())):
        put(tmp_path / part / name / "a.png")
    message = refused(lambda: list_images(tmp_path))
    require_facts(message, f"--data-dir {tmp_path}: class '{'dog' if 'cat' in names else 'Cat'}' ... train/ and val/")
