import json

import pytest
from PIL import Image

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.vision import headers
from hvdtrain.vision.headers import require_readable
from hvdtrain.vision.listing import list_images
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.terminal import terminal_of
from tests.unit.vision.data_sets import write_image

CACHE = ".hvdtrain-headers.json"


@pytest.fixture
def home(monkeypatch, tmp_path):
    """The user's own folder of caches."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    return tmp_path / "home" / "hvdtrain"


@pytest.fixture
def data(tmp_path, home):
    """Four images for training, the second without a header, and one for the test."""
    for name in ("train/cat/a", "train/cat/c", "train/dog/d", "val/cat/e", "val/dog/f"):
        write_image(tmp_path / "data" / f"{name}.png")
    (tmp_path / "data" / "train" / "cat" / "b.png").write_bytes(b"hello, I am text")
    return tmp_path / "data"


@pytest.fixture
def opened(monkeypatch):
    """The names of the files that are opened, from now on."""
    names, really = [], Image.open

    def noted(path):
        names.append(path.rpartition("/")[2])
        return really(path)

    monkeypatch.setattr(Image, "open", noted)
    return names


def look(data, comm=None, *, epochs=1, most=1):
    require_readable(comm or SerialComm(), list_images(data), epochs=epochs, max_unreadable=most)


@pytest.mark.parametrize("rank", ["0", "1"])
def test_a_terminal_shows_how_far_the_reading_is(data, monkeypatch, rank):
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", rank)
    shown = terminal_of(monkeypatch)
    look(data)
    for what in ("listing train: ", "listing val: ", "reading headers, 500 at a time: "):
        assert (what in shown.getvalue()) == (rank == "0")


def test_headers_are_looked_at_once_and_unreadable_ones_at_each_start(data, opened):
    look(data)
    assert sorted(opened) == ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"]
    opened.clear()
    look(data)
    assert opened == ["b.png"]
    write_image(data / "val" / "dog" / "g.png")
    opened.clear()
    look(data)
    assert len(opened) == 7  # the folder has changed


def test_an_image_that_was_repaired_in_place_is_good_again(data, capsys):
    look(data)
    assert capsys.readouterr().err.startswith("hvdtrain: warning: 1 of 6 images")
    (data / "train" / "cat" / "b.png").write_bytes((data / "train" / "cat" / "a.png").read_bytes())
    look(data, most=0)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("content", [b"", b"\x89PNG\r\n\x1a\n"])
def test_so_many_unreadable_images_are_let_pass_with_a_warning_and_one_more_is_refused(data, capsys, content):
    (data / "train" / "cat" / "z.png").write_bytes(content)
    (data / "val" / "cat" / "e.png").write_bytes(content)  # named, but not counted, as the run does not
    look(data, most=2)
    [line] = capsys.readouterr().err.splitlines()
    require_facts(line, f"hvdtrain: warning: 3 of 7 images ... {data / 'train' / 'cat' / 'b.png'}")
    message = refused(lambda: look(data, most=1))
    named = f"{data / 'train' / 'cat' / 'b.png'} (cannot identify image file)"
    facts = f"--data-dir {data}: 3 of 7 images ... {named}; ... 2 in 1 epochs ... the 1 "
    require_facts(message, facts)


@pytest.mark.parametrize(("epochs", "most", "passes"), [(3, 3, True), (3, 2, False)])
def test_each_epoch_counts_since_each_one_reads_them(data, epochs, most, passes):
    if passes:
        look(data, epochs=epochs, most=most)
    else:
        assert f"{epochs} in {epochs} epochs" in refused(lambda: look(data, epochs=epochs, most=most))
        assert not (data / CACHE).exists()


def test_the_ranks_of_each_host_share_its_images(data, opened):
    ranks = [Rank(3 + one, 6, local_rank=one, local_size=3) for one in range(3)]
    for rank in ranks:
        rank.answers = lambda value: [[*value[:-1], False]]  # so that nothing is kept, and the next one looks as well
        look(data, rank)
    assert sorted(opened) == ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"]
    assert [rank.said[0][1:] for rank in ranks] == [[0, 0, [], True], [1, 1, [1], True], [0, 0, [], True]]


def with_answers(*answers, **place):
    return Rank(0, len(answers), answers=[list(answers)], local_size=2, **place)


def test_what_the_ranks_of_this_host_have_found_is_kept_by_its_first(data):
    host = headers.socket.gethostname()
    look(data, with_answers(..., [host, 1, 1, [1], True], ["other", 1, 1, [3], True]))
    assert json.loads((data / CACHE).read_text())["unreadable"] == [1]


def test_nothing_is_kept_where_a_rank_of_this_host_has_not_looked(data):
    host = headers.socket.gethostname()
    look(data, with_answers(..., [host, 0, 0, [], False], ["other", 0, 0, [], True]))
    assert not (data / CACHE).exists()


def test_any_hosts_images_end_the_run_on_all(data):
    host = headers.socket.gethostname()
    comm = with_answers(..., [host, 0, 0, [], True], ["other", 5, 3, [4, 5], True])
    require_facts(refused(lambda: look(data, comm)), f"5 of 6 images ... {data / 'val' / 'cat' / 'e.png'}")


def test_a_rank_names_so_many_images_at_most_and_what_is_not_all_of_them_is_not_kept(data, monkeypatch):
    monkeypatch.setattr(headers, "_MAX_NAMED", 2)
    for name in ("train/cat/a", "train/cat/c", "train/dog/d"):
        (data / f"{name}.png").write_bytes(b"")
    rank = Rank()
    refused(lambda: look(data, rank, most=5, epochs=3))
    assert rank.said[0][1:4] == [4, 4, [0, 1]]
    look(data, most=4)
    assert not (data / CACHE).exists()


@pytest.mark.parametrize("error", [RuntimeError("Failed to decode"), NotImplementedError("pixel format")])
def test_whatever_pillow_raises_for_a_damaged_file_the_image_is_unreadable(data, monkeypatch, error):
    """AVIF and DDS, which it knows by their content whatever they are called."""

    def broken(path):
        raise error

    monkeypatch.setattr(Image, "open", broken)
    assert "6 of 6 images cannot be read" in refused(lambda: look(data))


@pytest.mark.parametrize(
    "damage",
    [
        lambda kept: kept[:-20],
        lambda _: b"[" * 100_000,
        lambda _: b"\xff\xfe",
        lambda _: b"[]",
        lambda kept: kept.replace(b'"key": "', b'"key": "0'),
        lambda kept: kept.replace(b"1\n  ]", b"6\n  ]"),
        lambda kept: kept.replace(b"1\n  ]", b"-1\n  ]"),
        lambda kept: kept.replace(b"1\n  ]", b'"b.png"\n  ]'),
    ],
)
def test_a_damaged_file_is_ignored_and_replaced(data, opened, damage):
    look(data)
    kept = (data / CACHE).read_bytes()
    assert damage(kept) != kept
    (data / CACHE).write_bytes(damage(kept))
    opened.clear()
    look(data)
    assert len(opened) == 6
    assert (data / CACHE).read_bytes() == kept


def test_where_the_data_cannot_be_written_the_users_own_folder_keeps_it(data, home, opened):
    (data / CACHE).mkdir()  # root may write everywhere, but no file in the place of a folder
    look(data)
    [kept] = home.iterdir()
    assert json.loads(kept.read_text())["unreadable"] == [1]
    opened.clear()
    look(data)
    assert opened == ["b.png"]
    assert not list(data.glob("*.part"))


@pytest.mark.parametrize("cache", ["", "not/absolute"])
def test_without_a_folder_of_caches_the_home_has_one(data, monkeypatch, tmp_path, cache):
    monkeypatch.setenv("XDG_CACHE_HOME", cache)
    monkeypatch.setenv("HOME", str(tmp_path / "me"))
    (data / CACHE).mkdir()
    look(data)
    assert len(list((tmp_path / "me" / ".cache" / "hvdtrain").iterdir())) == 1


def test_where_nothing_can_be_written_the_run_goes_on(data, monkeypatch, tmp_path, opened):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (data / CACHE).mkdir()
    look(data)
    look(data)
    assert len(opened) == 12
