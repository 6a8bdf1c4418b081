"""The thread that writes checkpoints, and disks that are full or broken."""

import errno
import os
import subprocess
import threading

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.files import MANIFEST, find_newest, load, open_one
from hvdtrain.safety.guard import CHECKPOINT_WRITE
from tests.unit.checkpoint.checkpoints import CALLS, Small, break_call, files_under, is_whole, names, put

PAGE = 4096
NO_ROOM = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def start():
    """Runs of one rank that save."""
    runs = []

    def start(root, **options):
        runs.append(Small(root, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.writer._thread.shutdown()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_writer_keeps_the_newest(tmp_path, start, keep):
    run = start(tmp_path, keep=keep)
    run.all(2, 4, 6, 8)
    assert names(tmp_path) == [f"step-{step:09d}" for step in (2, 4, 6, 8)[-keep:]]
    assert (run.steps, run.counts) == ([2, 4, 6, 8], {})
    assert is_whole(find_newest(tmp_path)[0], 8)


def test_steps_of_a_history_that_was_given_up_are_removed(tmp_path, start):
    put(tmp_path, 10, 20, 30)
    run = start(tmp_path)
    run.all(15)
    assert names(tmp_path) == ["step-000000010", "step-000000015"]


def test_later_changes_are_not_in_what_was_saved(tmp_path, start, monkeypatch):
    """The thread begins to write when the training has gone on."""
    go_on = threading.Event()
    original = checkpoint.commit

    def late(*arguments, **options):
        go_on.wait()
        return original(*arguments, **options)

    monkeypatch.setattr(checkpoint, "commit", late)
    run = start(tmp_path)
    run.begin(5)
    assert run.writer.is_busy
    with torch.no_grad():
        run.model.weight.fill_(6)
    run.model.step.fill_(6)
    run.facts["epoch"] = 6
    go_on.set()
    run.wait(5)
    assert not run.writer.is_busy
    assert is_whole(find_newest(tmp_path)[0], 5)


def test_a_save_waits_for_the_one_before(tmp_path, start, monkeypatch):
    writing, most, lock = [], [0], threading.Lock()
    original = checkpoint.commit

    def watched(*arguments, **options):
        with lock:
            writing.append(1)
            most[0] = max(most[0], len(writing))
        done = original(*arguments, **options)
        with lock:
            writing.pop()
        return done

    monkeypatch.setattr(checkpoint, "commit", watched)
    run = start(tmp_path)
    for step in range(1, 20):
        run.begin(step)
        assert run.steps == list(range(1, step)) or run.steps == list(range(1, step + 1))
    run.wait(19)
    assert most == [1]
    assert run.steps == list(range(1, 20))


def test_the_best_is_kept_apart_and_alone(tmp_path, start):
    run = start(tmp_path)
    for step in (1, 2, 3, 4):
        run.begin(step)
        if step in {1, 3}:
            run.best(step)
    run.wait(4)
    assert names(tmp_path) == ["best-000000003", "step-000000003", "step-000000004"]
    assert run.steps == [1, 2, 3, 4]
    best = open_one(tmp_path / "best-000000003")
    assert (best.step, best.about, list(best.files)) == (3, {"epoch": 1}, ["weights.pt"])
    assert load(best, "weights")["weight"].eq(3).all()
    for folder in tmp_path.glob("step-*"):
        (folder / MANIFEST).unlink()
    assert find_newest(tmp_path)[0] is None


def test_an_error_that_is_not_an_os_error_is_raised_once_by_the_next_call(tmp_path, start):
    run = start(tmp_path)
    for call in (run.writer.wait, lambda: run.all(2)):
        run.writer.begin(1)
        run.writer.save(1, {"state": np.zeros(2)}, {}, {})
        with pytest.raises(TypeError, match="could not be loaded again"):
            call()
        run.writer.wait()
        assert names(tmp_path) == []
    assert run.counts == {}
    run.all(3)
    assert run.steps == [3]


def test_a_callback_that_fails_on_disk_is_counted(tmp_path, start):
    def report(step):
        raise NO_ROOM

    run = start(tmp_path)
    run.writer._on_commit = report
    run.all(1)
    assert (names(tmp_path), run.counts) == (["step-000000001"], {CHECKPOINT_WRITE: 1})


@pytest.mark.parametrize("first", [1, 2, 3])
@pytest.mark.parametrize("name", CALLS)
def test_a_broken_disk_costs_no_checkpoint(tmp_path, start, capsys, name, first):
    """All calls from the first failing one on fail, until the disk is repaired."""
    run = start(tmp_path)
    run.all(1, 2)
    before = files_under(tmp_path)
    with pytest.MonkeyPatch.context() as patch:
        break_call(patch, name, errno.EIO, first=first)
        run.all(3)
    warnings = capsys.readouterr().err
    if run.steps == [1, 2]:
        assert before.items() <= files_under(tmp_path).items()
        assert run.counts == {CHECKPOINT_WRITE: 1}
        assert warnings == (
            f"hvdtrain: warning: checkpoint write failed: {tmp_path}: Input/output error; training continues\n"
        )
    else:
        assert (name, first) in {("mkdir", 3), ("rename", 2), ("rename", 3)}  # there are fewer calls
        assert warnings == ""
    run.all(4)
    assert run.steps[-1] == 4
    assert names(tmp_path) == [f"step-{step:09d}" for step in run.steps[-2:]]


@pytest.mark.parametrize(
    ("number", "left"),
    [(errno.EIO, (1, 2, 3, 4)), (errno.EROFS, (1, 2, 3, 4)), (errno.ENOSPC, (2, 3, 4)), (errno.EDQUOT, (2, 3, 4))],
)
def test_a_write_that_fails_once_is_tried_again(tmp_path, start, monkeypatch, number, left):
    """If the disk is full, the oldest is removed first."""
    run = start(tmp_path, keep=9)
    run.all(1, 2, 3)
    break_call(monkeypatch, "fsync", number, first=2, last=2)
    run.all(4)
    assert (run.steps, run.counts) == ([1, 2, 3, 4], {})
    assert names(tmp_path) == [f"step-{step:09d}" for step in left]


# --- a real disk that is full


@pytest.fixture(scope="module")
def disk(tmp_path_factory):
    """A file system of 1 MiB."""
    folder = tmp_path_factory.mktemp("disk")
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


@pytest.fixture
def small_disk(disk):
    """A folder on it, and a function that leaves only so many pages free."""
    root, filler = disk / "checkpoints", disk / "filler"

    def leave(pages):
        filler.unlink(missing_ok=True)
        free = os.statvfs(disk).f_bavail
        with filler.open("wb") as file:
            if free > pages:
                os.posix_fallocate(file.fileno(), 0, (free - pages) * PAGE)
        assert os.statvfs(disk).f_bavail == pages

    yield root, leave
    for path in [*disk.iterdir()]:
        checkpoint.remove(path)


@pytest.mark.parametrize("room_is_checked", [True, False])
def test_a_full_disk_at_any_moment_changes_nothing(small_disk, monkeypatch, room_is_checked):
    root, leave = small_disk
    put(root, 1, 2)
    before = files_under(root)
    if not room_is_checked:
        monkeypatch.setattr(checkpoint, "_require_room", lambda *_: None)
    for pages in range(100):
        leave(pages)
        try:
            put(root, 3, kib=40)
        except OSError:
            pass
        else:
            break
        assert files_under(root) == before
        assert names(root) == ["step-000000001", "step-000000002"]
        assert os.statvfs(root).f_bavail == pages
    assert pages > 10
    assert is_whole(find_newest(root)[0], 3)


@pytest.mark.parametrize("room_is_checked", [True, False])
def test_the_oldest_makes_room_on_a_full_disk(small_disk, start, monkeypatch, capsys, room_is_checked):
    root, leave = small_disk
    if not room_is_checked:
        monkeypatch.setattr(checkpoint, "_require_room", lambda *_: None)
    for pages in range(20):
        run = start(root, keep=2)
        run.all(1, 2, kib=40)
        leave(pages)
        run.all(3, kib=40)
        assert (run.steps, run.counts) == ([1, 2, 3], {}), pages
        assert is_whole(find_newest(root)[0], 3)
        assert names(root) == (["step-000000002", "step-000000003"])
        checkpoint.remove(root)
        leave(200)
    assert capsys.readouterr().err == ""


def test_all_but_the_last_good_checkpoint_are_removed_for_room(small_disk, start, capsys):
    root, _ = small_disk
    run = start(root, keep=3)
    run.all(1, 2, 3)
    before = files_under(root)
    for step, left in ((4, (2, 3)), (5, (3,)), (6, (3,))):
        run.all(step, kib=2000)
        assert names(root) == [f"step-{number:09d}" for number in left]
        assert files_under(root).items() <= before.items()
    assert (run.steps, run.counts) == ([1, 2, 3], {CHECKPOINT_WRITE: 3})
    assert is_whole(find_newest(root)[0], 3)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"hvdtrain: warning: checkpoint write failed: {root}: No space left on device, 2.1 MB needed"
    )


def test_a_resumed_run_keeps_the_checkpoint_that_it_started_from(small_disk, start):
    """Its start is the newest undamaged checkpoint, though there is a newer one."""
    root, leave = small_disk
    torn = put(root, 2, 3, kib=40)[-1]
    (torn / MANIFEST).unlink()
    before = files_under(root)
    leave(3)
    run = start(root, newest=2)
    run.all(4, 5, kib=40)
    assert files_under(root) == before
    assert (run.steps, run.counts) == ([], {CHECKPOINT_WRITE: 2})
    leave(50)
    run.all(6, kib=40)
    assert run.steps == [6]


def test_a_read_only_disk_changes_nothing(disk, small_disk, start, capsys):
    root, _ = small_disk
    run = start(root)
    run.all(1, 2)
    before = files_under(root)
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
    try:
        run.all(3)
        run.best(3)
        run.wait(3)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", disk], check=True)
    assert files_under(root) == before
    assert names(root) == ["step-000000001", "step-000000002"]
    assert (run.steps, run.counts) == ([1, 2], {CHECKPOINT_WRITE: 2})
    assert "Read-only file system" in capsys.readouterr().err
    run.all(4)
    assert run.steps == [1, 2, 4]
