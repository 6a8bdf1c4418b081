import socket
import urllib.request
from dataclasses import replace
from urllib.error import URLError

import pytest

from hvdtrain.tasks.vision import data
from hvdtrain.tasks.vision.settings import parse, scaled
from tests.ranks import Rank
from tests.refusals import refused
from tests.steps import required_sizes
from tests.unit.tasks.vision.data_sets import load


@pytest.fixture
def offline(monkeypatch):
    def unreachable(*_, **__):
        raise URLError(f"no route to host for {socket.getdefaulttimeout()} seconds")

    monkeypatch.setattr(urllib.request, "urlopen", unreachable)


@pytest.mark.usefixtures("offline")
def test_fetch_offline_names_the_way_out_and_leaves_nothing(tmp_path):
    message = refused(lambda: data.fetch("cifar10", tmp_path / "data"))
    assert f"--data-dir {tmp_path / 'data'}: CIFAR-10 is missing and cannot be downloaded" in message
    assert "no route to host for 15.0 seconds" in message
    python, *words = message.rpartition(": ")[2].split()
    assert (python, *words[:4]) == ("python", "-m", "hvdtrain.effnet", "--data", "digits")
    assert list((tmp_path / "data").iterdir()) == []
    way_out = parse(words[2:])
    for ranks in (1, 8):
        images = load(way_out.data)
        required_sizes(way_out, train=len(images.train), test=len(images.test), ranks=ranks)


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


def test_one_rank_of_each_host_fetches(monkeypatch):
    fetched = []
    for rank, local_rank in enumerate([0, 1, 0, 1]):
        monkeypatch.setattr(data, "fetch", lambda *_, rank=rank: fetched.append(rank))
        data.load_on_all(Rank(rank, 4, local_rank=local_rank, local_size=2), replace(scaled(), data="digits"))
    assert fetched == [0, 2]
