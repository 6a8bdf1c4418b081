import hashlib
import pickle
import socket
import struct
import urllib.request
from urllib.error import URLError

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from torchvision.datasets import CIFAR10

from hvdtrain.safety.exits import BadInput
from hvdtrain.vision import images as data

CPU = torch.device("cpu")

samples_counts = st.integers(1, 300)
global_batches = st.integers(1, 80)
sizes = st.integers(1, 9)


# --- which rank sees what


@given(count=st.integers(0, 500), size=sizes)
def test_shares_tile_the_whole_and_differ_by_at_most_one(count, size):
    parts = [list(range(count))[data.share(count, rank, size)] for rank in range(size)]
    assert [one for part in parts for one in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(samples=samples_counts, global_batch=global_batches, size=sizes)
def test_ranks_see_every_sample_once_in_the_same_number_of_steps(samples, global_batch, size):
    order = data.permutation(samples, seed=1, epoch=2)
    ranks = [data.rank_batches(order, global_batch=global_batch, rank=rank, size=size) for rank in range(size)]
    full, rest = divmod(samples, global_batch)
    counts = [global_batch] * full + [rest] * (rest > 0)  # the last batch is smaller
    for batches in ranks:
        assert [batch.global_count for batch in batches] == counts
    seen = [sample for batches in ranks for batch in batches for sample in batch.samples.tolist()]
    assert sorted(seen) == list(range(samples))
    for parts in zip(*ranks, strict=True):
        lengths = [len(part.samples) for part in parts]
        assert max(lengths) - min(lengths) <= 1
        assert sum(lengths) == parts[0].global_count


@given(samples=samples_counts, global_batch=global_batches, size=sizes)
def test_global_batches_do_not_depend_on_the_number_of_ranks(samples, global_batch, size):
    order = data.permutation(samples, seed=5, epoch=0)
    alone = data.rank_batches(order, global_batch=global_batch, rank=0, size=1)
    ranks = [data.rank_batches(order, global_batch=global_batch, rank=rank, size=size) for rank in range(size)]
    for whole, *parts in zip(alone, *ranks, strict=True):
        assert torch.equal(torch.cat([part.samples for part in parts]), whole.samples)


@given(samples=st.integers(0, 100), size=st.integers(1, 30))
def test_pieces_are_the_samples_in_order_and_never_empty(samples, size):
    cut = data.pieces(torch.arange(samples), size)
    assert [one for piece in cut for one in piece.tolist()] == list(range(samples))
    assert all(len(piece) == size for piece in cut[:-1])
    assert all(1 <= len(piece) <= size for piece in cut)


@given(samples=samples_counts, global_batch=global_batches, size=sizes, micro_batch=st.integers(1, 30))
def test_passes_are_as_few_as_micro_batches_allow_on_all_ranks(samples, global_batch, size, micro_batch):
    order = data.permutation(samples, seed=1, epoch=2)
    ranks = [data.rank_batches(order, global_batch=global_batch, rank=rank, size=size) for rank in range(size)]
    for parts in zip(*ranks, strict=True):
        passes = data.passes(parts[0].global_count, size=size, micro_batch=micro_batch)
        largest = max(len(part.samples) for part in parts)
        assert (passes - 1) * micro_batch < largest <= passes * micro_batch
        for part in parts:
            cut = part.samples.tensor_split(passes)
            assert len(cut) == passes >= 1
            assert max(map(len, cut)) <= micro_batch
            assert torch.equal(torch.cat(cut), part.samples)


@pytest.mark.parametrize(
    ("global_count", "size", "micro_batch", "passes"),
    [(12, 1, 5, 3), (12, 3, 4, 1), (13, 3, 4, 2), (1, 9, 256, 1), (512, 2, 256, 1), (512, 2, 255, 2), (5, 1, 1, 5)],
)
def test_passes(global_count, size, micro_batch, passes):
    assert data.passes(global_count, size=size, micro_batch=micro_batch) == passes


def test_permutation_repeats_and_differs_by_seed_and_epoch():
    first = data.permutation(100, seed=3, epoch=1)
    assert sorted(first.tolist()) == list(range(100))
    assert torch.equal(first, data.permutation(100, seed=3, epoch=1))
    for seed, epoch in ((3, 2), (4, 1), (1, 3)):
        assert not torch.equal(first, data.permutation(100, seed=seed, epoch=epoch))


def test_resident_split_gives_the_images_of_the_indices_in_their_order():
    images = torch.arange(5, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 2, 2)
    split = data.Resident(images, torch.arange(5) * 10)
    found = list(split.batches([torch.tensor([4, 0]), torch.tensor([2])], CPU))
    assert [labels.tolist() for _, labels in found] == [[40, 0], [20]]
    assert [raw[:, 0, 0, 0].tolist() for raw, _ in found] == [[4, 0], [2]]
    assert len(split) == 5


def test_resident_split_gives_an_empty_batch_for_no_indices():
    split = data.Resident(torch.zeros(5, 3, 4, 4, dtype=torch.uint8), torch.arange(5))
    none = torch.tensor([], dtype=torch.int64)
    found = list(split.batches([none, torch.tensor([2]), none], CPU))
    assert [tuple(raw.shape) for raw, _ in found] == [(0, 3, 4, 4), (1, 3, 4, 4), (0, 3, 4, 4)]
    assert [labels.tolist() for _, labels in found] == [[], [2], []]
    assert {(raw.dtype, labels.dtype) for raw, labels in found} == {(torch.uint8, torch.int64)}


@pytest.mark.parametrize("count", [0, 1, 3])
def test_collated_samples_are_stacked_and_none_are_an_empty_batch(count):
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8, generator=generator)
    raw, labels = data._collated([(images[number], 10 + number) for number in range(count)], height=8)
    assert (raw.dtype, labels.dtype) == (torch.uint8, torch.int64)
    assert torch.equal(raw, images[:count])
    assert labels.tolist() == [10, 11, 12][:count]


# --- data sets


def load(name, folder=None, *, height=8, rank=0, size=1):
    return data.load(name, folder, height=height, rank=rank, size=size, workers=1)


def refused(attempt):
    with pytest.raises(BadInput) as error:
        attempt()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_unknown_name_is_told_with_the_choice(tmp_path):
    assert refused(lambda: load("mnist", tmp_path)).startswith("--data 'mnist' is unknown: choose one of cifar10, dig")


@pytest.fixture(scope="module")
def digits():
    return load("digits")


def test_digits_are_colour_pictures_of_ten_classes(digits):
    assert len(digits.train) + len(digits.test) == 1797
    for split in (digits.train, digits.test):
        assert split.images.shape[1:] == (3, 32, 32)
        assert split.images.dtype == torch.uint8
        assert split.images.max() == 255
        assert sorted(split.labels.unique().tolist()) == list(range(10))
    assert (digits.classes, digits.height, digits.mirror) == (10, 32, False)


def test_digits_are_split_the_same_each_time(digits):
    again = load("digits")
    for ours, theirs in ((digits.train, again.train), (digits.test, again.test)):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


def test_digits_keep_their_labels_and_are_in_one_split_each(digits):
    from sklearn.datasets import load_digits

    bundle = load_digits()
    original = torch.from_numpy(bundle.images).float().flatten(1) / 16  # (1797, 64)
    images = torch.cat([digits.train.images, digits.test.images])
    small = torch.nn.functional.avg_pool2d(images[:, 0].float() / 255, 4).flatten(1)  # back to 8 x 8, blurred
    nearest = torch.cdist(small - small.mean(1, keepdim=True), original - original.mean(1, keepdim=True)).argmin(1)
    labels = torch.cat([digits.train.labels, digits.test.labels])
    assert torch.equal(labels, torch.from_numpy(bundle.target)[nearest])
    assert len(nearest.unique()) > 0.99 * len(nearest)  # blurring confuses a few


def test_mean_and_deviation_are_those_of_the_training_split(digits):
    values = digits.train.images.double() / 255
    for channel in range(3):
        assert digits.mean[channel] == pytest.approx(values[:, channel].mean().item(), abs=1e-5)
        assert digits.std[channel] == pytest.approx(values[:, channel].std().item(), abs=1e-5)


def python_2_pickle(value):
    """What Python 2 with NumPy 1 wrote CIFAR-10 with: byte strings and a module name that are gone since."""

    def packed(one):
        if isinstance(one, bytes):
            return b"T" + struct.pack("<i", len(one)) + one
        if isinstance(one, int):
            return b"J" + struct.pack("<i", one)
        if isinstance(one, list):
            return b"](" + b"".join(map(packed, one)) + b"e"
        if isinstance(one, dict):
            return b"}(" + b"".join(packed(key) + packed(item) for key, item in one.items()) + b"u"
        rows, columns = one.shape
        empty = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n(K\0tU\1btR"
        kind = b"cnumpy\ndtype\n(U\2u1K\0K\1tR(K\3U\1|NNN" + packed(-1) + packed(-1) + b"K\0tb"
        return empty + b"(K\1(" + packed(rows) + packed(columns) + b"t" + kind + b"\x89" + packed(one.tobytes()) + b"tb"

    return b"\x80\2" + packed(value) + b"."


class Cifar:
    """A small CIFAR-10 in the real one's format: five batches of three images and a test batch of ten."""

    names = (b"airplane", b"automobile", b"bird", b"cat", b"deer", b"dog", b"frog", b"horse", b"ship", b"truck")

    def __init__(self):
        random = np.random.default_rng(0)
        batches = [f"data_batch_{number}" for number in range(1, 6)]
        self.rows = {name: random.integers(0, 256, (3, 3072), dtype=np.uint8) for name in batches}
        self.rows["test_batch"] = random.integers(0, 256, (10, 3072), dtype=np.uint8)
        self.labels = {name: random.integers(0, 10, len(rows)).tolist() for name, rows in self.rows.items()}
        self.files = {
            name: python_2_pickle(
                {
                    b"data": self.rows[name],
                    b"labels": self.labels[name],
                    b"batch_label": name.encode(),
                    b"filenames": [b"%d.png" % number for number in range(len(self.rows[name]))],
                }
            )
            for name in self.rows
        }
        meta = {b"num_cases_per_batch": 3, b"label_names": list(self.names), b"num_vis": 3072}
        self.files["batches.meta"] = python_2_pickle(meta)

    def write(self, root):
        folder = root / "cifar-10-batches-py"
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            (folder / name).write_bytes(content)
        return folder


@pytest.fixture
def cifar(monkeypatch):
    written = Cifar()
    md5 = {name: hashlib.md5(content).hexdigest() for name, content in written.files.items()}  # noqa: S324
    monkeypatch.setattr(CIFAR10, "train_list", [[name, md5[name]] for name in md5 if name.startswith("data")])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", md5["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": md5["batches.meta"]})
    return written


def test_the_written_cifar10_has_the_real_keys(cifar):
    found = pickle.loads(cifar.files["data_batch_1"], encoding="bytes")  # noqa: S301 (we wrote it)
    assert set(found) == {b"data", b"labels", b"batch_label", b"filenames"}
    assert np.array_equal(found[b"data"], cifar.rows["data_batch_1"])


def test_cifar10_pixels_and_labels_land_where_they_belong(cifar, tmp_path):
    cifar.write(tmp_path)
    images = load("cifar10", tmp_path)
    assert (len(images.train), len(images.test)) == (15, 10)
    assert (images.classes, images.height, images.mirror) == (10, 32, True)
    channel, row, column = np.indices((3, 32, 32))
    for split, names in ((images.train, sorted(cifar.rows)[:5]), (images.test, ["test_batch"])):
        flat = np.concatenate([cifar.rows[name] for name in names])
        expected = flat[:, 1024 * channel + 32 * row + column]  # red plane, green plane, blue plane, row by row
        assert split.images.dtype == torch.uint8
        assert np.array_equal(split.images.numpy(), expected)
        assert split.labels.dtype == torch.int64
        assert split.labels.tolist() == [label for name in names for label in cifar.labels[name]]


@pytest.mark.parametrize("name", ["data_batch_1", "data_batch_5", "test_batch", "batches.meta"])
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


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*_, **__):
        raise URLError(f"no route to host for {socket.getdefaulttimeout()} seconds")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


@pytest.mark.usefixtures("offline")
def test_fetch_offline_names_the_way_out_and_leaves_nothing(tmp_path):
    message = refused(lambda: data.fetch("cifar10", tmp_path / "data"))
    assert f"CIFAR-10 is not in {tmp_path / 'data'} and cannot be downloaded" in message
    assert "no route to host for 15.0 seconds" in message
    assert "--data digits" in message
    assert list((tmp_path / "data").iterdir()) == []


def served(monkeypatch, content):
    def download(_url, root, **_):
        content(root)
        (root / "cifar-10-python.tar.gz").write_text("archive")

    monkeypatch.setattr("torchvision.datasets.cifar.download_and_extract_archive", download)


def test_fetch_puts_the_whole_folder_in_place(cifar, monkeypatch, tmp_path):
    served(monkeypatch, cifar.write)
    data.fetch("cifar10", tmp_path / "new" / "data")
    assert [path.name for path in (tmp_path / "new" / "data").iterdir()] == ["cifar-10-batches-py"]
    assert len(load("cifar10", tmp_path / "new" / "data").train) == 15


def test_fetch_of_a_damaged_download_leaves_nothing(cifar, monkeypatch, tmp_path):
    served(monkeypatch, lambda root: (cifar.write(root) / "test_batch").write_bytes(b""))
    assert "cannot be downloaded" in refused(lambda: data.fetch("cifar10", tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_fetch_gives_way_to_another_host_that_was_faster(cifar, monkeypatch, tmp_path):
    def meanwhile(root):
        cifar.write(root)
        (cifar.write(tmp_path) / "theirs").write_text("")

    served(monkeypatch, meanwhile)
    data.fetch("cifar10", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cifar-10-batches-py"]
    assert (tmp_path / "cifar-10-batches-py" / "theirs").exists()


@pytest.mark.usefixtures("offline")
def test_fetch_downloads_nothing_that_is_there_or_not_needed(cifar, tmp_path):
    cifar.write(tmp_path)
    data.fetch("cifar10", tmp_path)
    for name in ("digits", "synthetic", "imagefolder"):
        data.fetch(name, tmp_path / "none")
    assert not (tmp_path / "none").exists()


@pytest.mark.usefixtures("offline")
def test_fetch_into_a_place_that_cannot_be_written_names_it(tmp_path):
    (tmp_path / "file").write_text("")
    where = tmp_path / "file" / "data"
    assert refused(lambda: data.fetch("cifar10", where)).startswith(f"--data-dir {where}: cannot be written (Not a dir")


# --- image folders


def write_image(path, *, height=8, width=8, seed=0, mode="RGB"):
    shape = (height, width, 3) if mode == "RGB" else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels, mode).save(path)
    return pixels


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
        found = list(images.train.batches([torch.tensor(one, dtype=torch.int64) for one in lists], CPU))
        for (raw, labels), wanted in zip(found, lists, strict=True):
            assert (raw.dtype, labels.dtype) == (torch.uint8, torch.int64)
            assert raw.shape == (len(wanted), 3, 8, 8)
            assert np.array_equal(raw.numpy(), np.array([expected[index] for index in wanted]).reshape(raw.shape))
            assert labels.tolist() == [[0, 0, 1][index] for index in wanted]
    [(raw, labels)] = images.train.batches([torch.tensor([0, 3])], CPU)
    assert labels.tolist() == [0, data.UNREADABLE]
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
    for one in ("train", "val"):
        write_image(tmp_path / one / "cat" / "a.png")
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
