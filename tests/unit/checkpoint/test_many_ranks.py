"""Checkpoints of several ranks, which are threads here."""

import errno
import os
import re

import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.saves import resume
from hvdtrain.safety.guard import CHECKPOINT_WRITE
from tests.ranks import together
from tests.unit.checkpoint.checkpoints import Small, files_under, names


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def saved(root, size, *steps, elsewhere=None, **options):
    """The run of each of so many ranks, after it has saved these steps; rank `elsewhere` does not see the folder."""

    def save(comm):
        is_shared = comm.rank != elsewhere
        run = Small(
            root if is_shared else root / "elsewhere" / "checkpoints", comm=comm, is_shared=is_shared, **options
        )
        run.model.register_buffer("rank", torch.tensor([float(comm.rank)]))
        run.all(*steps)
        return run

    return together(size, save)


def brought_back(root, size):
    """The run of each of so many ranks, after it has found the newest checkpoint and gone on from it."""

    def go_on(comm):
        run = Small(root, comm=comm)
        run.model.register_buffer("rank", torch.tensor([-1.0]))
        found, passed_over = checkpoint.find_newest(root, comm)
        assert passed_over == []
        resume(run.parts, found)
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
        assert all(shared_bytes < run.parts.comm.bytes < shared_bytes + more for run in runs)


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


@pytest.mark.parametrize(("number", "left"), [(errno.EIO, [1, 2, 3]), (errno.ENOSPC, [2, 3])])
def test_a_file_of_one_rank_that_fails_once_is_tried_again(root, monkeypatch, capsys, number, left):
    saved(root, 2, 1, 2)
    breaks_put(monkeypatch, 1, number, times=1)
    runs = saved(root, 2, 3, newest=2, keep=9)
    assert names(root) == [f"step-{step:09d}" for step in left]
    assert [run.counts for run in runs] == [{}, {}]
    assert capsys.readouterr().err == ""
    assert ranks_of(brought_back(root, 2)) == [0, 1]


def test_a_rank_that_does_not_see_the_folder_saves_nothing_of_its_own(root):
    runs = saved(root, 3, 1, elsewhere=1)
    assert [run.counts for run in runs] == [{}] * 3
    assert names(root) == ["step-000000001"]
    assert checkpoint.find_newest(root)[0].ranks == [0, 2]
    assert ranks_of(brought_back(root, 3)) == [1.0] * 3
