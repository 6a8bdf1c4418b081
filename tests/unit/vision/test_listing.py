import io
import os
from multiprocessing.reduction import ForkingPickler

from torchvision.datasets import ImageFolder

from hvdtrain.vision.listing import list_images
from tests.refusals import refused, require_facts
from tests.unit.vision.data_sets import write_image


def put(path, content=b""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


def files(listing):
    return [(listing.path(image), int(listing.labels[image])) for image in range(len(listing))]


def test_classes_and_images_are_torchvisions_in_its_order(tmp_path):
    data, elsewhere = tmp_path / "data", tmp_path / "elsewhere"
    for name in ("dog/b.png", "dog/a.JPEG", "dog/B.jpg", "dog/sub/c.webp", "dog/sub-1/d.bmp", "dog/notes.txt"):
        put(data / name)
    for name in ("Emu/1.png", "Emu/10.png", "Emu/2.png", "Emu/.png", "Emu/with space\n.png", "Emu/ü.png"):
        put(data / name)
    put(elsewhere / "deep" / "e.tiff")
    put(data / "readme.png")  # in no class
    put(data / os.fsdecode(b"Emu/\xff.png"))
    (data / "cat").symlink_to(elsewhere)
    (data / "Emu" / "3.png").symlink_to(data / "dog" / "b.png")
    (data / "Emu" / "4.png").symlink_to(data / "nowhere")
    assert files(list_images(data)) == ImageFolder(data).samples
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


def changes(folder):
    yield lambda: put(folder / "cat" / "new.png")
    yield lambda: (folder / "cat" / "new.png").rename(folder / "cat" / "newer.png")
    yield (folder / "cat" / "newer.png").unlink
    yield lambda: (put(folder / "beside", b"1"), (folder / "beside").replace(folder / "cat" / "deep" / "b.png"))


def test_the_key_is_another_one_after_each_change_of_a_folder(tmp_path):
    for name in ("cat/a.png", "cat/deep/b.png", "dog/c.png"):
        put(tmp_path / name)
    keys = [list_images(tmp_path).key]
    for change in changes(tmp_path):
        assert list_images(tmp_path).key == keys[-1]
        change()
        keys.append(list_images(tmp_path).key)
    assert len(set(keys)) == 5
    put(tmp_path / ".hvdtrain-headers.json")  # beside the classes
    assert list_images(tmp_path).key == keys[-1]


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


def test_train_without_val_is_refused(tmp_path):
    write_image(tmp_path / "train" / "cat" / "a.png")
    assert str(tmp_path / "val") in refused(lambda: list_images(tmp_path))


def test_class_in_only_one_of_train_and_val_is_named(tmp_path):
    for part, name in (("train", "cat"), ("train", "dog"), ("val", "cat"), ("val", "emu")):
        put(tmp_path / part / name / "a.png")
    message = refused(lambda: list_images(tmp_path))
    require_facts(message, f"--data-dir {tmp_path}: class 'dog' ... train/ and val/")
