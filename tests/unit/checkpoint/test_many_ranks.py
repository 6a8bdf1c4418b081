"""Checkpoints of several ranks, which are threads here; make test-slow has 1,024 of them."""

import errno
import os
import re
import threading
from collections import defaultdict
from functools import cache

import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.saves import resume
from hvdtrain.safety.guard import CHECKPOINT_WRITE
from tests.ranks import together
from tests.unit.checkpoint.checkpoints import Small, files_under, names

MANY = 64


def saved(root, size, *steps, **options):
    """The run of each of so many ranks, after it has saved these steps."""

    def save(comm):
        run = Small(root, comm=comm, **options)
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


@pytest.fixture
def traffic(monkeypatch):
    """The files that each thread writes and reads; disks and manifests cost no time."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(checkpoint, "open_one", cache(checkpoint.open_one))
    traffic, put, content = defaultdict(list), checkpoint._write_file, checkpoint._read_file

    def note(path):
        if path.name != checkpoint.MANIFEST:
            name = f"ranks/{path.name}" if path.parent.name == "ranks" else path.name
            traffic[threading.get_ident()].append(name)

    monkeypatch.setattr(checkpoint, "_write_file", lambda path, written: (note(path), put(path, written)))
    monkeypatch.setattr(checkpoint, "_read_file", lambda path, **more: (note(path), content(path, **more))[1])
    return traffic


@pytest.mark.parametrize("size", [4, MANY, pytest.param(1024, marks=pytest.mark.slow)])
def test_what_passes_rank_0_and_what_the_others_do(tmp_path, traffic, size):
    """However many they are: none writes, reads, gives or gets more, but rank 0 gets 110 bytes of each at a save."""
    bytes_of = [run.parts.comm.bytes for run in saved(tmp_path, size, 1)]
    each = [[f"ranks/{rank}.pt"] for rank in range(size)]
    assert sorted(traffic.values()) == sorted([*each, ["state.pt"]])  # that is by the thread of rank 0
    assert bytes_of[0] < 400 + 110 * size
    assert all(given < 300 for given in bytes_of[1:])

    traffic.clear()
    runs = brought_back(tmp_path, size)
    assert [run.model.rank.item() for run in runs] == list(range(size))
    twice = [files * 2 for files in each[1:]]  # when it is searched for, and when it is loaded
    assert sorted(map(sorted, traffic.values())) == sorted([["ranks/0.pt"] * 2 + ["state.pt"] * 2, *twice])
    shared_bytes = (tmp_path / "step-000000001" / "state.pt").stat().st_size
    assert all(shared_bytes < run.parts.comm.bytes < shared_bytes + 300 for run in runs)


def test_files_of_many_ranks_are_read_by_rank_0_alone_where_there_are_fewer(tmp_path, traffic):
    saved(tmp_path, MANY, 1)
    traffic.clear()
    runs = brought_back(tmp_path, 2)
    assert [run.model.rank.item() for run in runs] == [(MANY - 1) / 2] * 2
    [read] = traffic.values()
    assert sorted(read) == sorted([*(f"ranks/{rank}.pt" for rank in range(MANY)), "state.pt"] * 2)
    shared_bytes = (tmp_path / "step-000000001" / "state.pt").stat().st_size
    assert max(run.parts.comm.bytes for run in runs) < shared_bytes + 5000


# --- what one rank cannot write


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


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_a_file_of_one_rank_that_cannot_be_written_is_one_failure(tmp_path, monkeypatch, capsys, rank, number):
    """If its disk is full, the oldest was removed for a second try, but never the last good one."""
    breaks_put(monkeypatch, 9, 0, times=0)
    saved(tmp_path, 3, 1, 2, 3, keep=3)
    before = files_under(tmp_path)
    breaks_put(monkeypatch, rank, number, times=2)
    runs = saved(tmp_path, 3, 4, newest=3, keep=3)
    after = files_under(tmp_path)
    assert names(tmp_path) == ["step-000000001", "step-000000002", "step-000000003"][number != errno.EIO :]
    assert after.items() <= before.items()
    assert [run.counts for run in runs] == [{CHECKPOINT_WRITE: 1}, {}, {}]
    assert runs[0].steps == []
    [said] = capsys.readouterr().err.splitlines()
    who = "" if rank == 0 else r"rank 2 on \S+: "
    assert re.fullmatch(
        rf"hvdtrain: warning: checkpoint write failed: {tmp_path}: {who}{os.strerror(number)}; training continues", said
    )
    runs = saved(tmp_path, 3, 5, newest=3, keep=3)
    assert runs[0].steps == [5]
    assert [run.model.rank.item() for run in brought_back(tmp_path, 3)] == [0, 1, 2]


@pytest.mark.parametrize(("number", "left"), [(errno.EIO, [1, 2, 3]), (errno.ENOSPC, [2, 3])])
def test_a_file_of_one_rank_that_fails_once_is_tried_again(tmp_path, monkeypatch, capsys, number, left):
    saved(tmp_path, 2, 1, 2)
    breaks_put(monkeypatch, 1, number, times=1)
    runs = saved(tmp_path, 2, 3, newest=2, keep=9)
    assert names(tmp_path) == [f"step-{step:09d}" for step in left]
    assert [run.counts for run in runs] == [{}, {}]
    assert capsys.readouterr().err == ""
    assert [run.model.rank.item() for run in brought_back(tmp_path, 2)] == [0, 1]


def test_a_rank_that_does_not_see_the_folder_saves_nothing_of_its_own(tmp_path):
    def save(comm):
        elsewhere = comm.rank == 1
        run = Small(tmp_path / ("other" if elsewhere else "root"), comm=comm, is_shared=not elsewhere)
        run.model.register_buffer("rank", torch.tensor([float(comm.rank)]))
        run.all(1)
        return run

    assert [run.counts for run in together(3, save)] == [{}] * 3
    assert not (tmp_path / "other").exists()
    found, _ = checkpoint.find_newest(tmp_path / "root")
    assert found.ranks == [0, 2]
    assert [run.model.rank.item() for run in brought_back(tmp_path / "root", 3)] == [1.0] * 3
