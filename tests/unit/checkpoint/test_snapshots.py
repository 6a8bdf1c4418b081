import errno
import json
import os
from unittest.mock import DEFAULT, Mock

import pytest
import torch

from hvdtrain.checkpoint import files, snapshots
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.checkpoint.snapshots import Snapshots
from hvdtrain.core.position import Position
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.loop.progress import Unreported
from hvdtrain.loop.save_points import NEVER
from hvdtrain.ranks.comm import SerialComm
from tests.ranks import Rank, together
from tests.unit.checkpoint.checkpoints import folder_of, names, put, record_of
from tests.unit.loop.reported import IMAGES
from tests.unit.loop.trainings import begun, same

MIDDLE = Position(step=3, epoch=0, visited=48, totals={"loss": 90.5, "count": 32.0}, train_s=1.5)


def passed(monkeypatch, text):
    monkeypatch.setenv("HVDLAUNCH_RANK", json.dumps({"snapshots": text}))


@pytest.fixture
def memory(monkeypatch):
    file = os.memfd_create("hvdlaunch-1")
    passed(monkeypatch, f"{os.getpid()} {file} hvdlaunch-1")
    yield file
    os.close(file)


def saves_of(training, tmp_path, kept):
    (tmp_path / "ranks").mkdir()
    record = record_of(Tracker(tmp_path, is_writer=True, task=IMAGES, result={}))
    folder = folder_of(tmp_path, newest=None, metadata=training.metadata)
    return Saves(training.step, training.parts, folder, record, NEVER, keep=2, snapshots=kept)


def test_a_snapshot_becomes_a_checkpoint_with_the_steps_since_the_last_report(tmp_path, memory, monkeypatch):
    training, root = begun(runs_dir=tmp_path), tmp_path / "checkpoints"
    list(training.epoch(Position()))
    saves = saves_of(training, tmp_path, snapshots.open_on_all(SerialComm()))
    unreported = Unreported(totals={"loss": 1.5, "count": 16.0}, unreadable=2, loss_spikes=1, skipped_steps=3)
    monkeypatch.setenv("HVDLAUNCH_REPORT", str(tmp_path / "report.json"))
    saves.snapshot(MIDDLE, unreported)
    assert json.loads((tmp_path / "report.json").read_text()) == {"snapshot": "3"}
    assert snapshots.bring_to_disk(root, memory, keep=2)
    assert os.fstat(memory).st_size == 0
    found, _ = files.find_newest(root)
    again = begun(runs_dir=tmp_path)
    assert not same(training, again)
    position = resume(again.parts, found)
    assert same(training, again)
    assert (position.step, position.visited, position.totals) == (3, 48, {"loss": 92.0, "count": 48.0})
    result = found.metadata["tracker"]["result"]
    assert [result[name] for name in ("unreadable_images", "loss_spikes", "skipped_steps")] == [2, 1, 3]


def take(kept, *steps, values=8, sums="", equal=None):
    for step in steps:
        document = {"weight": torch.full((values,), float(step)), "name": (1, "x", None)}
        own = {"own": document, "sums": sums, "unreported": {"totals": {}, "unreadable": 0, "loss_spikes": 0}}
        own["unreported"]["skipped_steps"] = 0
        counts = '{"loss_spikes": 0, "unreadable_images": 0, "skipped_steps": 0}'
        metadata = (
            f'{{"parts": 1, "unit": "images", "position": {{"totals": {{}}}}, "tracker": {{"result": {counts}}}}}'
        )
        kept.take(step, lambda own=own, metadata=metadata: ({**own, "state": {}, "about": metadata}, equal or {}))


def brought(tmp_path, memory, keep=2):
    snapshots.bring_to_disk(tmp_path, memory, keep=keep)
    found, _ = files.find_newest(tmp_path)
    return None if found is None else (found.step, files.load(found, "ranks/0")["weight"].tolist())


def test_a_copy_that_a_kill_has_torn_is_passed_over(tmp_path, memory, monkeypatch):
    kept = Snapshots(SerialComm(), memory)
    take(kept, 1, 2)

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", killed)
    with pytest.raises(KeyboardInterrupt):
        take(kept, 3)
    assert brought(tmp_path, memory) == (2, [2.0] * 8)


@pytest.mark.parametrize("values", [8, 9])
def test_the_newest_of_the_copies_is_used_also_of_another_shape(tmp_path, memory, values):
    kept = Snapshots(SerialComm(), memory)
    take(kept, 1, 2, 3)
    take(kept, 4, values=values)
    assert brought(tmp_path, memory) == (4, [4.0] * values)


def test_a_newer_checkpoint_on_disk_stays_the_newest(tmp_path, memory):
    take(Snapshots(SerialComm(), memory), 4)
    put(tmp_path, 3, 5)
    assert not snapshots.bring_to_disk(tmp_path, memory, keep=1)
    assert names(tmp_path) == ["step-000000003", "step-000000005"]


def test_as_many_checkpoints_are_kept_as_otherwise(tmp_path, memory):
    take(Snapshots(SerialComm(), memory), 6)
    put(tmp_path, 3, 5)
    assert brought(tmp_path, memory)[0] == 6
    assert names(tmp_path) == ["step-000000005", "step-000000006"]


def test_on_a_full_disk_the_oldest_checkpoint_gives_way(tmp_path, memory, monkeypatch):
    put(tmp_path, 3, 5)
    take(Snapshots(SerialComm(), memory), 6)
    full = OSError(errno.ENOSPC, "no space")
    monkeypatch.setattr(files, "begin", Mock(wraps=files.begin, side_effect=[full, DEFAULT]))
    assert brought(tmp_path, memory)[0] == 6
    assert names(tmp_path) == ["step-000000005", "step-000000006"]


@pytest.mark.parametrize("fits", [(10**9, 2), (50_000, 1), (1000, 0)])
def test_copies_that_fit_into_half_of_the_free_memory(tmp_path, memory, monkeypatch, capfd, fits):
    free, copies = fits
    monkeypatch.setattr(snapshots, "free_memory_bytes", lambda _: free)
    kept = Snapshots(SerialComm(), memory)
    take(kept, 1, 2)
    assert len(kept._areas) == copies
    assert kept.is_due() is False
    assert capfd.readouterr().err.count("note: ") == (copies < 2)
    assert brought(tmp_path, memory) == ((2, [2.0] * 8) if copies else None)


def test_one_is_requested_in_the_step_that_ends_when_it_is_due(memory, monkeypatch):
    kept, now = Snapshots(SerialComm(), memory), iter((10.0, 11.0, 12.0, 13.0))
    kept._due_at_s = 12.9
    with monkeypatch.context() as inside:
        inside.setattr(snapshots.time, "monotonic", lambda: next(now))
        requested = [kept.is_due() for _ in range(4)]
    assert requested == [False, False, True, True]


def test_replicas_that_differ_are_not_used(tmp_path, memory, capfd):
    heard = (lambda own: [own, own], lambda own: [2, 2] if own == 0 and own is not False else [own, own])  # two copies
    ranks = [Rank(rank, 2, answers=answers) for rank, answers in enumerate(heard)]
    for sums in ("aa", "ab"):
        kept = [Snapshots(rank, memory) for rank in ranks]
        for each, rank_sums in zip(kept, sums, strict=True):
            take(each, 1, sums=rank_sums)
        assert snapshots.bring_to_disk(tmp_path / sums, memory, keep=2) == (sums == "aa")
    assert "replicas differ" in capfd.readouterr().err


def test_what_cannot_be_read_is_reported_and_forgotten(tmp_path, memory, capfd):
    take(Snapshots(SerialComm(), memory), 1)
    os.pwrite(memory, b"x" * 40, (1 << 16) + 24)  # the text
    put(tmp_path, 0)
    assert not snapshots.bring_to_disk(tmp_path, memory, keep=2)
    assert "the newest state in memory is not used" in capfd.readouterr().err
    assert names(tmp_path) == ["step-000000000"]


@pytest.mark.parametrize("values", [(8, 8), (8, 90_000)])
def test_ranks_elsewhere_send_theirs_to_rank_0(tmp_path, memory, values):
    def taken(comm):
        kept = Snapshots(comm, memory if comm.rank == 0 else None, [1, 2])
        for step, count in enumerate(values, 1):
            take(kept, step, values=count + comm.rank)
        return comm.bytes

    sent = together(3, taken)
    assert brought(tmp_path, memory) == (2, [2.0] * values[1])
    found, _ = files.find_newest(tmp_path)
    assert [len(files.load(found, f"ranks/{rank}")["weight"]) for rank in range(3)] == [values[1] + n for n in range(3)]
    assert max(sent[1:]) < 2 * 4 * sum(values) + 20_000


def test_the_ranks_of_a_host_copy_in_turn_what_is_equal_on_all(tmp_path, memory):
    weights = {str(number): torch.full((number + 1,), float(number)) for number in range(5)}

    def taken(comm):
        kept = Snapshots(comm, memory if comm.rank < 2 else None, [2])
        take(kept, 1, equal={"model": weights})
        return [len(area.tensors) - 1 for area in kept._areas[0].values() if area.tensors] if kept._areas else []

    assert together(3, taken) == [[2], [3], []]
    assert brought(tmp_path, memory) == (1, [1.0] * 8)
    saved = files.load(files.find_newest(tmp_path)[0], "state")["model"]
    assert saved.keys() == weights.keys()
    assert all(torch.equal(value, saved[name]) for name, value in weights.items())


def test_ranks_elsewhere_or_of_another_process_have_no_file(memory, monkeypatch):
    os.close(snapshots.open_file())
    for value in ("1 2 3", f"{os.getpid()} {memory} hvdlaunch-2", "x", ""):
        passed(monkeypatch, value)
        assert snapshots.open_file() is None
    assert snapshots.open_on_all(SerialComm()) is None
