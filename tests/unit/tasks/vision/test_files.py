import os
import signal
import struct
import zlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader

from hvdtrain.insight.profiling.clocks import HostClock
from hvdtrain.loop.feed import readers
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.guard import Guard
from hvdtrain.tasks.vision import files
from hvdtrain.tasks.vision.data import load_on_all
from hvdtrain.tasks.vision.files import BROKEN, decode
from hvdtrain.tasks.vision.images import NO_LABEL
from hvdtrain.tasks.vision.settings import scaled
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.steps import CPU
from tests.unit.tasks.vision.data_sets import EIGHT, by_pillow, folder_of, write_image


def write(path, mode, **options):
    """Colours that flow, as JPEG wants them, 61 pixels wide and 45 high."""
    few = np.random.default_rng(7).integers(0, 256, (5, 7, 3), dtype=np.uint8)
    Image.fromarray(few).resize((61, 45)).convert(mode).save(path, **options)
    return str(path)


TURNED = Image.Exif()
TURNED[0x0112] = 6  # orientation: to be shown a quarter turned


@pytest.mark.parametrize(
    ("suffix", "mode", "options"),
    [
        ("jpg", "RGB", {"subsampling": 2, "quality": 60}),
        ("jpg", "RGB", {"keep_rgb": True}),
        ("jpg", "RGB", {"exif": TURNED}),
        ("jpg", "L", {}),
        ("jpg", "CMYK", {}),
        ("png", "RGBA", {}),
        ("png", "P", {}),
        ("png", "LA", {}),
        ("gif", "RGB", {}),
        ("webp", "RGB", {}),
    ],
)
def test_an_image_is_decoded_as_pillow_does(tmp_path, suffix, mode, options):
    path = write(tmp_path / f"a.{suffix}", mode, **options)
    pixels = decode(path)
    assert (pixels.dtype, pixels.shape) == (torch.uint8, (3, 45, 61))
    assert torch.equal(pixels, by_pillow(path))


RAMP = np.linspace(0, 1, 64)[None].repeat(4, 0)  # grey from black to white


def write_pnm(path, maximum):
    path.write_bytes(b"P5 64 4 %d\n" % maximum + (RAMP * maximum).round().astype(">u2").tobytes())


def write_png_in_16_bits(path, values):
    """A PNG of 16 bits in each of three channels, which Pillow reads and does not write."""

    def chunk(kind, content):
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    rows = b"".join(b"\0" + np.repeat(row[:, None], 3, 1).astype(">u2").tobytes() for row in values)
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 64, 4, 16, 2, 0, 0, 0))
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b""))


@pytest.mark.parametrize(
    ("name", "put"),
    [
        *(
            (name, lambda path, white=white, kind=kind: Image.fromarray((RAMP * white).astype(kind)).save(path))
            for name, white, kind in (
                ("16.png", 65535, "u2"),
                ("14.png", 16383, "u2"),
                ("12.png", 4095, "u2"),
                ("10.tif", 1023, "u2"),
                ("32.tif", 65535, "i4"),
                ("1.tif", 1, "f4"),
                ("255.tif", 255, "f4"),
            )
        ),
        (
            "white-is-0.tif",
            lambda path: Image.fromarray(((1 - RAMP) * 65535).astype("u2")).save(path, tiffinfo={262: 0}),
        ),
        ("10.pgm", lambda path: write_pnm(path, 1023)),
        ("16.pgm", lambda path: write_pnm(path, 65535)),
        ("rgb.png", lambda path: write_png_in_16_bits(path, RAMP * 65535)),
    ],
)
def test_more_than_8_bits_are_decoded_by_their_range(tmp_path, name, put):
    put(tmp_path / name)
    expected = torch.from_numpy(RAMP * 255).expand(3, 4, 64)
    assert (decode(str(tmp_path / name)) - expected).abs().max() <= 1


@pytest.mark.parametrize("dim", [1, 16])
def test_a_dark_picture_stays_dark_if_its_format_has_a_range(tmp_path, dim):
    path = tmp_path / "a.pgm"
    path.write_bytes(b"P5 64 4 1023\n" + (RAMP * 1023 / dim).round().astype(">u2").tobytes())
    assert decode(str(path)).max() == round(255 / dim)


@pytest.mark.parametrize("values", [RAMP - 0.5, RAMP * 300, RAMP + np.nan, RAMP + np.inf])
def test_floats_without_a_range_are_rejected_by_name_before_the_training(tmp_path, values):
    for name in ("cat/a", "cat/b", "dog/a"):
        write_image(tmp_path / f"{name}.png")
    path = tmp_path / "owl" / "b.tif"  # the only one of its class: for training
    path.parent.mkdir()
    with np.errstate(invalid="ignore"):
        Image.fromarray(values.astype("f4")).save(path)
    line = refused(lambda: load_on_all(SerialComm(), settings(tmp_path, max_unreadable_images=0, epochs=1, seed=0)))
    require_facts(
        line, f"1 of 4 images cannot be read, such as {path} (has values from ... not 0 to 1.0 or 255.0. Save it"
    )


def test_integers_and_colours_without_a_range_are_broken(tmp_path):
    Image.fromarray((RAMP * 70000).astype("i4")).save(tmp_path / "a.tif")
    write_png_in_16_bits(tmp_path / "a.png", RAMP * 4095)
    for name in ("a.tif", "a.png"):
        with pytest.raises(BROKEN, match="Save it with 8 bits"):
            decode(str(tmp_path / name))


def test_a_jpeg_whose_name_is_no_text_is_decoded(tmp_path):
    path = write(tmp_path / "a.jpg", "RGB")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff.jpg")
    Path(path).rename(odd)
    assert torch.equal(decode(odd), by_pillow(odd))


@pytest.mark.parametrize("kept", [1, 200, -3])
def test_a_jpeg_that_is_cut_off_is_broken(tmp_path, kept):
    path = tmp_path / "a.jpg"
    write(path, "RGB")
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BROKEN):
        decode(str(path))


def test_a_jpeg_that_torchvision_refuses_is_left_to_pillow(tmp_path, monkeypatch):
    def refusing(*_, **__):
        raise RuntimeError("Image is incomplete or truncated")

    path = write(tmp_path / "a.jpg", "RGB")
    monkeypatch.setattr(files, "decode_jpeg", refusing)
    assert torch.equal(decode(path), by_pillow(path))


def workers():
    """The loader workers of this process, those that are its forks among them."""
    own, found = psutil.Process(), set()
    for one in own.children(recursive=True):
        with suppress(psutil.Error):  # it has just ended
            words = one.cmdline()
            found |= {one.pid} if words == own.cmdline() or "spawn_main" in " ".join(words) else set()
    return found


@pytest.fixture
def folder(tmp_path):
    """Seven images to train on and to evaluate; of the former, number 6 is torn."""
    for number in range(7):
        for part in ("train", "val"):
            write_image(tmp_path / part / "cat" / f"{number}.png", height=20, width=30, seed=number)
    torn = tmp_path / "train" / "cat" / "6.png"
    torn.write_bytes(torn.read_bytes()[:900])
    return tmp_path


def expected_of(folder, sample, epoch):
    """The pixels of an image: a random part in an epoch, the middle without one."""
    pixels = by_pillow(folder / ("val" if epoch is None else "train") / "cat" / f"{sample}.png")
    return (
        EIGHT.crop_middle(pixels) if epoch is None else EIGHT.crop_randomly(pixels, seed=3, epoch=epoch, sample=sample)
    )


def assert_read(folder, split, epoch, batches):
    """Read batches, of whole images alone, and compare each image."""
    found = split.batches([torch.tensor(samples, dtype=torch.int64) for samples in batches], CPU, epoch)
    for batch, samples in zip(found, batches, strict=True):
        images = batch["images"]
        assert (images.dtype, images.shape) == (torch.uint8, (len(samples), 3, 8, 8))
        assert batch["labels"].tolist() == [0] * len(samples)
        for image, sample in zip(images, samples, strict=True):
            assert torch.equal(image, expected_of(folder, sample, epoch))


def assert_torn(split, capfd):
    """An image that cannot be decoded is black, without a label, and named."""
    [batch] = split.batches([torch.tensor([0, 6])], CPU, 0)
    assert batch["labels"].tolist() == [0, NO_LABEL]
    assert not batch["images"][1].any()
    assert "cat/6.png" in capfd.readouterr().err


def test_a_worker_reads_training_and_test_epoch_after_epoch(folder, capfd):
    before = workers()
    images = folder_of(folder, augment=True, seed=3)
    assert (len(images.train), len(images.test)) == (7, 7)
    assert (images.classes, images.height, images.is_mirrorable, images.is_cropped) == (1, 8, True, True)
    assert (images.mean, images.std) == (EIGHT.mean, EIGHT.std)
    for epoch in (7, 8):
        assert_read(folder, images.train, epoch, [[5, 0], [], [3]])
    assert_torn(images.train, capfd)
    next(images.train.batches([torch.tensor([place]) for place in range(6)], CPU, 0))  # ranks leave within an epoch
    assert_read(folder, images.test, None, [[1, 0]])
    assert len(workers() - before) == 1
    images.train._readers._loader._iterator._shutdown_workers()


@pytest.mark.parametrize("reading", [{"workers": 0}, {"workers": 2, "prefetch": 0}])
def test_a_rank_that_reads_by_itself_reads_the_same_in_any_batches(folder, monkeypatch, capfd, reading):
    monkeypatch.setattr(files, "_GUARD", Guard())  # it has reported nothing yet
    before, images = workers(), folder_of(folder, augment=True, seed=3, **reading)
    assert_read(folder, images.train, 7, [[5, 0], [3], [1, 4], [], [2]])
    assert_read(folder, images.test, None, [[0, 1, 2]])
    assert_torn(images.train, capfd)
    assert workers() == before


def test_where_each_phase_is_alone_the_rank_itself_reads_one_batch_when_asked(folder, monkeypatch):
    monkeypatch.setattr(DataLoader, "__iter__", None)  # no worker is asked
    clock = HostClock()
    monkeypatch.setattr(HostClock, "isolated", True)
    found = folder_of(folder, augment=True, seed=3).train.batches([torch.tensor([5]), torch.tensor([3])], CPU, 7, clock)
    assert torch.equal(next(found)["images"][0], expected_of(folder, 5, 7))
    (folder / "train" / "cat" / "3.png").unlink()
    assert next(found)["labels"].tolist() == [NO_LABEL]


def test_without_augmentation_training_images_are_read_as_those_that_are_evaluated(folder):
    [batch] = folder_of(folder, workers=0).train.batches([torch.tensor([2])], CPU, 3)
    assert torch.equal(batch["images"][0], EIGHT.crop_middle(by_pillow(folder / "train" / "cat" / "2.png")))


class Dying:
    """A loader whose worker dies as it hands over its second batch."""

    def __iter__(self):
        yield {}
        raise ConnectionResetError("by peer")


@pytest.mark.parametrize("told", [True, False])
def test_a_worker_that_dies_as_it_hands_over_a_batch_is_named(tmp_path, monkeypatch, told):
    def killed(*_):
        raise RuntimeError("DataLoader worker (pid 7) is killed")

    write_image(tmp_path / "cat" / "a.png")
    monkeypatch.setattr(readers, "DataLoader", lambda *_, **__: Dying())
    monkeypatch.setattr(readers, "_SIGCHLD_S", 5.0 if told else 0.0)
    before = signal.signal(signal.SIGALRM, killed)
    try:
        batches = folder_of(tmp_path).train.batches([torch.tensor([0])] * 2, CPU, 0)
        assert next(batches) == {}
        if told:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(RuntimeError if told else ConnectionResetError, match="pid 7" if told else "by peer"):
            next(batches)
    finally:
        signal.signal(signal.SIGALRM, before)


def settings(folder, **changed):
    return replace(scaled(), data="imagefolder", data_dir=folder, model="efficientnet_tiny", **changed)


@pytest.mark.parametrize(("reading", "processes"), [({}, 1), ({"workers": 2}, 2), ({"workers": 2, "prefetch": 0}, 0)])
def test_a_folder_is_read_as_the_settings_say(tmp_path, monkeypatch, capsys, reading, processes):
    started = []

    class Loader(DataLoader):
        """It reads by itself, and notes how many processes it was to start."""

        def __init__(self, dataset, *, num_workers=0, batch_sampler, collate_fn, **_):
            started.append(num_workers)
            super().__init__(dataset, batch_sampler=batch_sampler, collate_fn=collate_fn)

    monkeypatch.setattr(readers, "DataLoader", Loader)
    monkeypatch.setattr(readers, "count_host_cores", lambda _: 1)  # one worker
    for part in ("train", "val"):
        write_image(tmp_path / part / "cat" / "a.png", height=40, width=50)
        write_image(tmp_path / part / "dog" / "c.png")
    (tmp_path / "train" / "cat" / "b.png").write_bytes(b"text")
    images = load_on_all(SerialComm(), settings(tmp_path, seed=5, max_unreadable_images=50, **reading))
    usage = "train is train/ (3 images of 'cat', 'dog'), test is val/ (2 images); files used: 5, not used: none"
    facts = f"hvdtrain: note: --data-dir {tmp_path}: {usage}"
    require_facts(capsys.readouterr().err, facts)
    assert (images.height, images.classes, len(images.train), len(images.test)) == (32, 2, 3, 2)
    first, second = images.train.batches([torch.tensor([0]), torch.tensor([1])], CPU, 2)
    pixels = by_pillow(tmp_path / "train" / "cat" / "a.png")
    assert torch.equal(first["images"][0], replace(EIGHT, crop=32).crop_randomly(pixels, seed=5, epoch=2, sample=0))
    assert [first["labels"].tolist(), second["labels"].tolist()] == [[0], [NO_LABEL]]
    assert started == [processes]
    assert "exceed the 24 " in refused(lambda: load_on_all(SerialComm(), settings(tmp_path, max_unreadable_images=24)))


def test_ranks_with_other_images_are_told_before_they_look_at_them(tmp_path):
    for part in ("train", "val"):
        write_image(tmp_path / part / "cat" / "a.png")
        write_image(tmp_path / part / "dog" / "a.png")
    facts = {"the numbers of training and test images": [2, 3]}
    other = Rank(0, 2, answers=lambda value: [value, ["h", facts if isinstance(value[1], dict) else None]])
    assert "has [2, 2], rank 1 on h has [2, 3]" in refused(lambda: load_on_all(other, settings(tmp_path)))


@pytest.mark.parametrize(
    "files",
    [
        ("train/cat/a.png", "val/cat/a.png"),
        ("cat/a.png", "cat/b.png"),
    ],
)
def test_images_of_one_class_are_refused(tmp_path, files):
    for file in files:
        write_image(tmp_path / file)
    line = refused(lambda: load_on_all(SerialComm(), settings(tmp_path)))
    assert line.startswith(f"--data-dir {tmp_path}: all training images are in one class folder. ")
