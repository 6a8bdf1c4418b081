import os
import subprocess
import sys

import pytest

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.folder import clear, is_shared, open_folder
from hvdtrain.safety.exits import BadInput


def files_under(folder):
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_text(content)
    return folder


def opened(folder, *, overwrite=False, resume=True, **options):
    """Open the folder, make it ready, and release its lock."""
    run = open_folder(folder, overwrite=overwrite, resume=resume, **options)
    clear(folder, is_resumed=run.is_resumed, keep_checkpoints=run.has_saved)
    os.close(run.descriptor)
    return run


def refused(folder, **options):
    with pytest.raises(BadInput) as error:
        opened(folder, **options)
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


# --- the run folder


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_new_or_empty_run_folder_is_made_ready(tmp_path, exists, overwrite):
    folder = tmp_path / "runs" / "effnet" / "first"
    if exists:
        folder.mkdir(parents=True)
    opened(folder, overwrite=overwrite)
    assert sorted(path.name for path in folder.rglob("*")) == ["checkpoints", "lock", "ranks"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("result", [None, '{"exit_reason": "failed"}', '{"exit_reason"', '{"np": 1}', "[" * 200_000])
def test_unfinished_run_is_replaced(tmp_path, result, overwrite):
    folder = put(tmp_path / "run", config_json="{}", **{} if result is None else {"result_json": result})
    (folder / "ranks").mkdir()
    (folder / "ranks" / "rank-0.json").write_text("{}")
    opened(folder, overwrite=overwrite)
    assert files_under(folder) == {"ranks-before/rank-0.json": b"{}"}


@pytest.mark.parametrize("saved", [False, True])
def test_the_last_words_of_the_previous_attempt_are_kept(tmp_path, saved):
    folder = tmp_path / "run"
    for words in ("its first", "its second"):
        opened(folder)
        put(folder / "ranks", rank_1_err=words)
    if saved:
        checkpoint.write(folder / "checkpoints", 3, {"state": {}}, about={})
    for _ in range(2):  # an attempt that leaves no files removes none
        opened(folder)
        assert (folder / "ranks-before" / "rank_1_err").read_text() == "its second"
        assert not any((folder / "ranks").iterdir())
    opened(folder, resume=False)
    assert files_under(folder) == {}


def test_finished_run_is_kept_unless_it_may_be_overwritten(tmp_path):
    folder = put(tmp_path / "run", config_json="{}", result_json='{"exit_reason": "finished"}')
    (folder / "ranks").mkdir()
    before = files_under(folder)
    message = refused(folder)
    assert "finished run" in message
    assert "--run" in message
    assert "--overwrite" in message
    assert files_under(folder) == before
    opened(folder, overwrite=True)
    assert files_under(folder) == {}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "result.json", ".hidden"])
def test_foreign_folder_is_never_touched(tmp_path, name, overwrite):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text("years of work")
    assert "not a run's" in refused(folder, overwrite=overwrite)
    assert files_under(folder) == {name: b"years of work"}


def test_a_run_that_died_before_its_first_file_is_replaced(tmp_path):
    opened(tmp_path / "run", overwrite=False)
    opened(tmp_path / "run", overwrite=False)


def test_foreign_file_in_a_run_folder_keeps_it(tmp_path):
    folder = tmp_path / "run"
    opened(folder, overwrite=False)
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_text("years of work")
    assert "model.bin" in refused(folder, overwrite=True)
    assert (folder / "model.bin").exists()


@pytest.mark.parametrize("below", [".", "effnet/first"])
def test_run_folder_that_is_or_is_below_a_file_is_named(tmp_path, below):
    (tmp_path / "file").write_text("content")
    assert "cannot be written" in refused(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "content"


# --- the lock


def test_a_folder_in_use_is_refused_and_free_again_when_its_owner_is_killed(tmp_path):
    code = "import sys, time; from pathlib import Path; from hvdtrain.checkpoint.folder import open_folder\n"
    code += (
        "run = open_folder(Path(sys.argv[1]), overwrite=False, resume=True); print('open', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, tmp_path / "run"], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout.readline() == "open\n"
        before = files_under(tmp_path / "run")
        assert f"in use, by process {owner.pid} on " in refused(tmp_path / "run", overwrite=True)
        assert files_under(tmp_path / "run") == before
        owner.kill()
    opened(tmp_path / "run")


def test_hosts_see_whether_the_folder_is_the_same(tmp_path):
    run = opened(tmp_path / "run")
    assert is_shared(tmp_path / "run", run.nonce)
    assert not is_shared(tmp_path / "run", "another's")
    assert not is_shared(tmp_path / "elsewhere", run.nonce)
    assert (tmp_path / "elsewhere" / "ranks").is_dir()
