import pytest
from PIL import Image

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety import life
from hvdtrain.tasks.vision import headers
from hvdtrain.tasks.vision.headers import require_readable
from hvdtrain.tasks.vision.listing import list_images
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.unit.tasks.vision.data_sets import write_image


@pytest.fixture
def data(tmp_path):
    """Four images for training, the second without a header, and two for the test."""
    for name in ("train/cat/a", "train/cat/c", "train/dog/d", "val/cat/e", "val/dog/f"):
        write_image(tmp_path / "data" / f"{name}.png")
    (tmp_path / "data" / "train" / "cat" / "b.png").write_bytes(b"hello, I am text")
    return tmp_path / "data"


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are opened, from now on."""
    names, really = [], Image.open

    def noted(path):
        names.append(path.rpartition("/")[2][0])
        return really(path)

    monkeypatch.setattr(Image, "open", noted)
    return names


def look(data, comm=None, *, epochs=1, most=1):
    require_readable(comm or SerialComm(), list_images(data), epochs=epochs, max_unreadable=most)


def test_a_person_sees_how_far_the_listing_is(data, monkeypatch):
    shown = []
    monkeypatch.setattr(life, "doing", shown.append)
    look(data)
    texts = [one.text() for one in shown if one is not None]
    assert [text.partition(":")[0] for text in texts] == ["listing train", "listing val"]


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n"])
def test_so_many_unreadable_images_are_let_pass_with_a_warning_and_one_more_is_refused(data, capsys, content):
    (data / "train" / "cat" / "z.png").write_bytes(content)
    (data / "val" / "cat" / "e.png").write_bytes(content)  # named, but not counted, as the run does not
    look(data, most=2)
    [line] = capsys.readouterr().err.splitlines()
    require_facts(line, f"hvdtrain: warning: 3 of 7 images ... {data / 'train' / 'cat' / 'b.png'}")
    message = refused(lambda: look(data, most=1))
    named = f"{data / 'train' / 'cat' / 'b.png'} (cannot identify image file)"
    require_facts(message, f"--data-dir {data}: 3 of 7 images ... {named}; ... 2 in 1 epochs ... the 1 ")
    for name in ("train/cat/b", "train/cat/z", "val/cat/e"):
        write_image(data / f"{name}.png")
    look(data, most=0)
    assert capsys.readouterr() == ("", "")


def test_each_epoch_counts_since_each_one_reads_them(data):
    look(data, epochs=3, most=3)
    assert "3 in 3 epochs" in refused(lambda: look(data, epochs=3, most=2))


def test_the_ranks_of_each_host_share_its_images(data, opened):
    ranks = [Rank(3 + one, 6, local_rank=one, local_size=3) for one in range(3)]
    for rank in ranks:
        look(data, rank, most=6)
    assert sorted(opened) == list("abcdef")
    assert [rank.said[0][1:3] for rank in ranks] == [[0, 0], [1, 1], [0, 0]]


def test_of_many_images_some_at_equal_distances_are_read(data, opened, monkeypatch):
    monkeypatch.setattr(headers, "_MOST_READ", 3)
    look(data, most=2)
    assert sorted(opened) == ["a", "c", "e"]
    (data / "train" / "cat" / "a.png").write_bytes(b"")
    look(data, most=2)
    assert "about 2 in 1 epochs" in refused(lambda: look(data, most=1)), "those not read are alike"


def test_any_hosts_images_end_the_run_on_all(data):
    other = ["other", 5, 3, (4, "torn")]
    comm = Rank(0, 3, answers=[[..., ["other", 0, 0, None], other]], local_size=2)
    require_facts(refused(lambda: look(data, comm)), f"5 of 6 images ... {data / 'val' / 'cat' / 'e.png'} (torn)")


@pytest.mark.parametrize("error", [RuntimeError("Failed to decode"), NotImplementedError("pixel format")])
def test_whatever_pillow_raises_for_a_damaged_file_the_image_is_unreadable(data, monkeypatch, error):
    """AVIF and DDS, which it knows by their content whatever they are called."""

    def broken(path):
        raise error

    monkeypatch.setattr(Image, "open", broken)
    assert "6 of 6 images cannot be read" in refused(lambda: look(data))
