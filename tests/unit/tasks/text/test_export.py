import os
import re
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text import export as exported
from hvdtrain.tasks.text.export import FILES, require_exportable
from hvdtrain.tasks.text.pretrained import pretrained_on_all
from hvdtrain.tasks.text.weights import load_pretrained
from tests.unit.tasks.text.berts import LABELS, classifier, masked_lm, saved


def bytes_of(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_former_export_is_replaced(tmp_path):
    saved(tmp_path / "out", masked_lm(seed=1))
    folder = saved(tmp_path / "out", classifier(seed=2), labels=LABELS)
    model = classifier(seed=3)
    load_pretrained(model, pretrained_on_all(SerialComm(), str(folder)))
    assert torch.equal(model.classifier.weight, classifier(seed=2).classifier.weight)
    assert set(bytes_of(folder)) == FILES
    assert list(tmp_path.iterdir()) == [folder]


@pytest.mark.parametrize(("nth", "before"), [(1, False), (1, True), (5, False), (5, True)])
def test_a_disk_that_fails_leaves_what_was_there(tmp_path, monkeypatch, nth, before):
    """The first of five files, or the last before the folder gets its name."""
    folder = tmp_path / "out"
    content = bytes_of(saved(folder, masked_lm(seed=1))) if before else None
    calls = iter(range(1, 100))
    real = os.fsync

    def fails(descriptor):
        if next(calls) == nth:
            raise OSError(28, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="No space left"):
        saved(folder, masked_lm(seed=2))
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if before else [])
    assert content is None or bytes_of(folder) == content


def test_weights_that_find_no_room_are_an_os_error(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr(exported, "save_file", full)
    with pytest.raises(OSError, match=r"model.safetensors: I/O error: No space"):
        saved(tmp_path / "out", masked_lm())
    assert not list(tmp_path.iterdir())


def test_what_a_killed_process_has_left_is_no_hindrance(tmp_path):
    (tmp_path / ".out.part").mkdir()
    (tmp_path / ".out.part" / "model.safetensors").write_text("half")
    saved(tmp_path / "out", masked_lm())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def free(folder, *, replace=False, runs=Path("runs")):
    require_exportable(folder, runs=runs, replace=replace)


@pytest.mark.parametrize(("folder", "runs"), [("..", "/elsewhere"), ("out", "out/runs")])
def test_a_folder_that_the_run_works_in_would_be_replaced_and_is_refused(tmp_path, monkeypatch, folder, runs):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(BadInput, match=rf"^--export {re.escape(folder)}: the run itself"):
        free(Path(folder), runs=Path(runs))


def test_what_has_come_into_the_folder_since_is_not_lost(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("mine")
    with pytest.raises(OSError, match=r"thesis.txt has come into it"):
        saved(tmp_path / "out", masked_lm())
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["thesis.txt"]


def test_a_link_stays_one(tmp_path):
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "real")
    free(tmp_path / "link")
    assert set(bytes_of(saved(tmp_path / "link", masked_lm()))) == FILES
    assert (tmp_path / "link").is_symlink()


def test_before_the_training_a_folder_must_be_free(tmp_path):
    free(tmp_path / "new" / "deep")
    (tmp_path / "empty").mkdir()
    free(tmp_path / "empty")
    former = saved(tmp_path / "former", masked_lm())
    free(former, replace=True)
    with pytest.raises(BadInput, match=r"^--export .*former: not empty.* another folder\.$"):
        free(former)
    (former / "thesis.txt").write_text("mine")
    with pytest.raises(BadInput, match="not empty"):
        free(former, replace=True)


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(BadInput, match=r"^--export .*: cannot be written \(.*another folder\.$"):
            free(folder, replace=True)
