"""The thread that writes checkpoints, and disks that are full or broken."""

import errno
import os
import re
import threading
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.files import MANIFEST, find_newest
from hvdtrain.checkpoint.saves import resume
from hvdtrain.settings.safety.guard import CHECKPOINT_WRITE
from tests.ranks import together
from tests.unit.checkpoint.checkpoints import CALLS, Small, break_call, files_under, is_whole, names, put


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


@pytest.fixture
def start():
    """Runs of one rank that save."""
    runs = []

    def start(root, **options):
        runs.append(Small(root, **options))
        return runs[-1]

    yield start
    for run in runs:
        run._writer._thread.shutdown()


def test_steps_of_a_history_that_was_given_up_are_removed(root, start):
    put(root, 10, 20, 30)
    run = start(root)
    run.all(15)
    assert names(root) == ["step-000000010", "step-000000015"]


def test_later_changes_are_not_in_what_was_saved(root, start, monkeypatch):
    """The thread begins to write when the training has gone on."""
    go_on = threading.Event()
    original = checkpoint.commit

    def late(*arguments, **options):
        go_on.wait()
        return original(*arguments, **options)

    monkeypatch.setattr(checkpoint, "commit", late)
    run = start(root)
    run.begin(5)
    with torch.no_grad():
        run.model.weight.fill_(6)
    run.model.step.fill_(6)
    run._metadata["epoch"] = 6
    go_on.set()
    run.wait(5)
    assert is_whole(find_newest(root)[0], 5)


def test_an_error_that_is_not_an_os_error_is_raised_once_by_the_next_call(root, start):
    run = start(root)
    for call in (run._writer.wait, lambda: run.all(2)):
        write = partial(checkpoint.commit, checkpoint.begin(root, 1), ranks={})
        run._writer.submit("step", 1, write, {"state": np.zeros(2)}, {})
        with pytest.raises(TypeError, match="could not be loaded again"):
            call()
        run._writer.wait()
        assert names(root) == []
    assert run.counts == {}
    run.all(3)
    assert run.steps == [3]


@pytest.mark.parametrize(("name", "first"), [*((name, 1) for name in CALLS), ("write", 2), ("fsync", 3)])
def test_a_broken_disk_costs_no_checkpoint(root, start, capsys, name, first):
    """All calls from the first failing one on fail, until the disk is repaired."""
    run = start(root)
    run.all(1, 2)
    before = files_under(root)
    with pytest.MonkeyPatch.context() as patch:
        break_call(patch, name, errno.EIO, first=first)
        run.all(3)
    assert before.items() <= files_under(root).items()
    assert (run.steps, run.counts) == ([1, 2], {CHECKPOINT_WRITE: 1})
    assert capsys.readouterr().err == (
        f"hvdtrain: warning: checkpoint write failed: {root}: Input/output error; training continues\n"
    )
    run.all(4)
    assert run.steps == [1, 2, 4]
    assert names(root) == ["step-000000002", "step-000000004"]


@pytest.mark.parametrize(
    ("name", "call", "number", "left"),
    [
        ("fsync", 2, errno.EIO, (1, 2, 3, 4)),
        ("fsync", 2, errno.ENOSPC, (2, 3, 4)),
        ("rename", 1, errno.ENOSPC, (2, 3, 4)),  # at the very end
        ("rename", 1, errno.EDQUOT, (2, 3, 4)),
    ],
)
def test_a_write_that_fails_once_is_tried_again(root, start, monkeypatch, *, name, call, number, left):
    """If the disk is full, the oldest is removed first."""
    run = start(root, keep=9)
    run.all(1, 2, 3)
    break_call(monkeypatch, name, number, first=call, last=call)
    run.all(4)
    assert (run.steps, run.counts) == ([1, 2, 3, 4], {})
    assert names(root) == [f"step-{step:09d}" for step in left]


# --- a disk that is full


def test_all_but_the_last_good_checkpoint_are_removed_for_room(root, start, monkeypatch, capsys):
    run = start(root, keep=3)
    run.all(1, 2, 3)
    before = files_under(root)
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda _: SimpleNamespace(free=10))
    for step, left in ((4, (2, 3)), (5, (3,)), (6, (3,))):
        run.all(step)
        assert names(root) == [f"step-{number:09d}" for number in left]
        assert files_under(root).items() <= before.items()
    assert (run.steps, run.counts) == ([1, 2, 3], {CHECKPOINT_WRITE: 3})
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"hvdtrain: warning: checkpoint write failed: {root}: No space left on device, 0.0 MB needed"
    )


def test_a_resumed_run_keeps_the_checkpoint_that_it_started_from(root, start):
    """Its start is the newest undamaged checkpoint, though there is a newer one."""
    torn = put(root, 2, 3)[-1]
    (torn / MANIFEST).unlink()
    before = files_under(root)
    run = start(root, newest=2)
    with pytest.MonkeyPatch.context() as patch:
        break_call(patch, "fsync", errno.ENOSPC, first=1)
        run.all(4, 5)
    assert files_under(root) == before
    assert (run.steps, run.counts) == ([], {CHECKPOINT_WRITE: 2})
    run.all(6)
    assert run.steps == [6]


# --- several ranks, which are threads here


def saved(root, size, *steps, elsewhere=None, **options):
    """The run of each of so many ranks, after it has saved these steps; rank `elsewhere` does not see the folder."""

    def save(comm):
        apart = [] if elsewhere is None else [elsewhere]
        here = root / "elsewhere" / "checkpoints" if comm.rank in apart else root
        run = Small(here, comm=comm, apart=apart, **options)
        run.model.register_buffer("rank", torch.tensor([float(comm.rank)]))
        run.all(*steps)
        return run

    return together(size, save)


def brought_back(root, size, apart=()):
    """The run of each of so many ranks, after it has found the newest checkpoint and gone on from it."""

    def go_on(comm):
        here = root / "elsewhere" if comm.rank in apart else root
        run = Small(here, comm=comm)
        run.model.register_buffer("rank", torch.tensor([-1.0]))
        found, passed_over = checkpoint.find_newest(here, comm, apart=apart)
        assert passed_over == []
        resume(run.parts, found, apart=apart)
        return run

    return together(size, go_on)


def ranks_of(runs):
    return [run.model.rank.item() for run in runs]


def test_however_many_ranks_there_are_none_gives_or_gets_more(root):
    """But rank 0 gets 110 bytes of each at a save."""
    many = 16
    first, *rest = (run.parts.comm.bytes for run in saved(root, many, 1))
    assert first < 400 + 110 * many
    assert max(rest) < 300
    shared_bytes = (root / "step-000000001" / "state.pt").stat().st_size
    for size, ranks, more in ((many, list(range(many)), 300), (2, [7.5, 7.5], 5000)):
        runs = brought_back(root, size)
        assert ranks_of(runs) == ranks
        sent = shared_bytes + (root / "step-000000001" / MANIFEST).stat().st_size
        assert all(sent < run.parts.comm.bytes < sent + more for run in runs)


def breaks_put(monkeypatch, rank, number, *, times):
    """That rank's own file cannot be written so many times."""
    original, tried = checkpoint._write_file, []

    def put(path, content):
        if path.name == f"{rank}.pt":
            tried.append(path)
            if len(tried) <= times:
                original(path, content[:100])
                raise OSError(number, os.strerror(number))
        original(path, content)

    monkeypatch.setattr(checkpoint, "_write_file", put)


@pytest.mark.parametrize(("rank", "number"), [(0, errno.EIO), (2, errno.ENOSPC), (2, errno.EDQUOT)])
def test_a_file_of_one_rank_that_cannot_be_written_is_one_failure(root, monkeypatch, capsys, rank, number):
    """If its disk is full, the oldest was removed for a second try, but never the last good one."""
    saved(root, 3, 1, 2, 3, keep=3)
    before = files_under(root)
    breaks_put(monkeypatch, rank, number, times=2)
    runs = saved(root, 3, 4, newest=3, keep=3)
    assert names(root) == ["step-000000001", "step-000000002", "step-000000003"][number != errno.EIO :]
    assert files_under(root).items() <= before.items()
    assert [run.counts for run in runs] == [{CHECKPOINT_WRITE: 1}, {}, {}]
    assert runs[0].steps == []
    [said] = capsys.readouterr().err.splitlines()
    who = "" if rank == 0 else r"rank 2 on \S+: "
    assert re.fullmatch(
        rf"hvdtrain: warning: checkpoint write failed: {root}: {who}{os.strerror(number)}; training continues", said
    )
    assert saved(root, 3, 5, newest=3, keep=3)[0].steps == [5]
    assert ranks_of(brought_back(root, 3)) == [0, 1, 2]


@pytest.mark.parametrize("apart", [[], [2], [1, 2]])
def test_rank_0_writes_and_reads_for_a_rank_that_does_not_see_the_folder(root, apart):
    runs = saved(root, 3, 1, elsewhere=1)
    assert [run.counts for run in runs] == [{}] * 3
    assert names(root) == ["step-000000001"]
    assert ranks_of(brought_back(root, 3, apart)) == [0, 1, 2]
