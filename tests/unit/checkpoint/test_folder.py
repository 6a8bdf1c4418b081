import os
import shutil

import pytest

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.folder import clear, hold_again, is_shared, open_folder
from tests.refusals import refused, require_facts
from tests.unit.checkpoint.checkpoints import files_under, left


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_text(content)
    return folder


def opened(folder, *, overwrite=False):
    """Open the folder, make it ready, and release its lock."""
    run = open_folder(folder, overwrite=overwrite)
    clear(folder, is_resumed=run.is_resumed, keep_checkpoints=run.has_saved)
    os.close(run.descriptor)
    return run


def refused_for(folder, **options):
    line = refused(lambda: opened(folder, **options))
    assert str(folder) in line
    return line


def test_a_new_folder_is_made_ready_and_one_that_is_empty(tmp_path):
    folder = tmp_path / "runs" / "effnet" / "first"
    for _ in range(2):
        opened(folder)
        assert sorted(path.name for path in folder.rglob("*")) == ["checkpoints", "lock", "ranks"]


@pytest.mark.parametrize("result", [None, '{"exit_reason": "failed"}', '{"exit_reason"', "[" * 200_000])
def test_unfinished_run_is_replaced(tmp_path, result):
    folder = put(tmp_path / "run", config_json="{}", **{} if result is None else {"result_json": result})
    put(folder / "ranks", rank_json="{}")
    opened(folder)
    assert left(folder) == {"ranks-before/rank.json": b"{}"}


@pytest.mark.parametrize("saved", [False, True])
def test_the_last_words_of_the_previous_attempt_are_kept(tmp_path, saved):
    folder = tmp_path / "run"
    for words in ("its first", "its second"):
        opened(folder)
        put(folder / "ranks", rank_1_err=words)
    if saved:
        checkpoint.write(folder / "checkpoints", 3, {"state": {}}, metadata={})
    for _ in range(2):  # an attempt that leaves no files removes none
        opened(folder)
        assert (folder / "ranks-before" / "rank_1_err").read_text() == "its second"
        assert not any((folder / "ranks").iterdir())


def test_finished_run_is_kept_unless_it_may_be_overwritten(tmp_path):
    folder = put(tmp_path / "run", config_json="{}", result_json='{"exit_reason": "finished"}')
    (folder / "ranks").mkdir()
    checkpoint.write(folder / "checkpoints", 3, {"state": {}}, metadata={})
    before = left(folder)
    require_facts(refused_for(folder), "finished run ... --run ... --overwrite")
    assert left(folder) == before
    assert not opened(folder, overwrite=True).is_resumed
    assert left(folder) == {}


@pytest.mark.parametrize("name", ["thesis.tex", "result.json", ".hidden"])
def test_foreign_folder_is_never_touched(tmp_path, name):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text("years of work")
    assert "not a run's" in refused_for(folder, overwrite=True)
    assert files_under(folder) == {name: b"years of work"}  # and no lock


@pytest.mark.parametrize("name", ["model.bin", "metrics.jsonl", "result.json.part"])
def test_foreign_file_in_a_run_folder_keeps_it(tmp_path, name):
    """A link by the name of a run's file would be written through."""
    folder, foreign = tmp_path / "run", tmp_path / "foreign"
    opened(folder)
    foreign.write_text("years of work")
    if name != "model.bin":
        (folder / name).symlink_to(foreign)
    else:
        foreign.rename(folder / name)
    assert name in refused_for(folder, overwrite=True)
    assert (folder / name).read_text() == "years of work"


@pytest.mark.parametrize("below", [".", "effnet/first"])
def test_run_folder_that_is_or_is_below_a_file_is_named(tmp_path, below):
    (tmp_path / "file").write_text("content")
    assert "cannot be written" in refused_for(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "content"


def test_hosts_see_whether_the_folder_is_the_same(tmp_path):
    run = opened(tmp_path / "run")
    assert is_shared(tmp_path / "run", run.nonce)
    assert not is_shared(tmp_path / "run", "another's")
    assert not is_shared(tmp_path / "elsewhere", run.nonce)
    assert (tmp_path / "elsewhere" / "ranks").is_dir()


def save(folder, step=3):
    checkpoint.write(folder / "checkpoints", step, {"state": {}}, metadata={})


@pytest.mark.parametrize("lost", ["ranks", "config.json", "lock"])
def test_a_run_resumes_from_its_checkpoints_alone(tmp_path, lost):
    folder = put(tmp_path / "run", config_json="{}")
    (folder / "ranks").mkdir()
    opened(folder)
    save(folder)
    put(folder, config_json="{}")
    checkpoint.remove(folder / lost)
    assert opened(folder).has_saved
    assert checkpoint.can_resume(folder / "checkpoints", 3)


def test_nothing_is_judged_or_changed_while_another_holds_the_lock(tmp_path):
    """The holder is between two steps of its preparation: the folder of its ranks is away."""
    folder = tmp_path / "run"
    owner = open_folder(folder, overwrite=False)
    put(folder, result_json='{"exit_reason": "finished"}')
    (folder / "ranks").rmdir()
    before = files_under(folder)
    assert f"in use, by process {os.getpid()} on " in refused_for(folder, overwrite=True)
    assert (files_under(folder), (folder / "ranks").exists()) == (before, False)
    clear(folder, is_resumed=False, keep_checkpoints=False)
    os.close(owner.descriptor)
    opened(folder)


@pytest.mark.parametrize("change", ["removed", "moved and back", "unlocked"])
def test_a_run_whose_folder_goes_away_holds_a_new_one(tmp_path, change):
    folder, moved = tmp_path / "run", tmp_path / "moved"
    owner = open_folder(folder, overwrite=False)
    for _ in range(2):  # the second time nothing has changed
        hold_again(folder, owner)
    if change == "removed":
        shutil.rmtree(folder)
    elif change == "unlocked":
        (folder / "lock").unlink()
    else:
        folder.rename(moved)
    hold_again(folder, owner)
    if change == "moved and back":
        shutil.rmtree(folder)
        moved.rename(folder)
        hold_again(folder, owner)
    save(folder)
    assert f"in use, by process {os.getpid()} on " in refused_for(folder)
    os.close(owner.descriptor)
    assert opened(folder).has_saved


def test_a_run_does_not_write_into_a_folder_that_has_taken_the_place_of_its_own(tmp_path):
    folder = tmp_path / "run"
    first = open_folder(folder, overwrite=False)
    folder.rename(tmp_path / "moved")
    second = opened(folder)
    for foreign in (False, True):
        if foreign:
            shutil.rmtree(folder)
            put(folder, thesis="years of work")
        before = files_under(folder)
        with pytest.raises(OSError, match="removed or moved"):
            hold_again(folder, first)
        assert files_under(folder) == before
    assert second.nonce != first.nonce
    os.close(first.descriptor)
