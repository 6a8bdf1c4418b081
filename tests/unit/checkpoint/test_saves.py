from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.core.position import Position
from hvdtrain.insight.tracking.tracker import Tracker
from hvdtrain.loop.save_points import NEVER, Decision
from hvdtrain.settings.safety.exits import REPLICAS_DIFFER, BadInput, EndOfRun
from hvdtrain.settings.safety.guard import CHECKPOINT_WRITE, Guard
from tests.ranks import Rank
from tests.refusals import ended
from tests.unit.checkpoint.checkpoints import folder_of, names, record_of
from tests.unit.loop.reported import IMAGES
from tests.unit.loop.trainings import begun, same

MIDDLE = Position(step=3, epoch=0, visited=48, totals={"loss": 90.5, "count": 48.0, "right": 7.0}, train_s=1.5)


@pytest.fixture
def start(tmp_path):
    """What saves the checkpoints of a training in tmp_path/checkpoints."""

    def make(training, *, newest=None, keep=2):
        (tmp_path / "ranks").mkdir(exist_ok=True)
        tracker = Tracker(tmp_path, is_writer=True, task=IMAGES, result={})
        folder = folder_of(tmp_path, newest=newest, metadata=training.metadata)
        record = record_of(tracker)
        saves = Saves(training.step, training.parts, folder, record, NEVER, keep=keep, micro_batch=8)
        saves.tracker = tracker
        return saves

    return make


def is_saved(saves, position=MIDDLE):
    """Save; whether it has been written in the end."""
    saves.save(position)
    return saves.wait(position.step)


def found_in(tmp_path):
    found, passed_over = checkpoint.find_newest(tmp_path / "checkpoints")
    assert passed_over == []
    return found


def test_what_was_saved_is_brought_back_and_says_what_it_is_of(tmp_path, start):
    training = begun(runs_dir=tmp_path)
    list(training.epoch(Position()))
    saves = start(training)
    assert is_saved(saves)
    found, again = found_in(tmp_path), begun(runs_dir=tmp_path)
    assert not same(training, again)
    assert resume(again.parts, found) == MIDDLE
    assert same(training, again)
    assert (found.metadata["np"], found.metadata["global_batch"], found.metadata["samples"]) == (1, 16, 53)
    assert (found.metadata["config"]["runs_dir"], found.metadata["config"]["dropout"]) == (str(tmp_path), 0.3)
    assert found.metadata["tracker"]["result"]["steps"] == 0


def test_a_step_is_saved_once(tmp_path, start, monkeypatch):
    saves, written = start(begun()), []
    original = checkpoint.commit
    monkeypatch.setattr(checkpoint, "commit", lambda *given, **more: written.append(1) or original(*given, **more))
    for _ in range(3):
        saves.save(MIDDLE)
    assert is_saved(saves, replace(MIDDLE, step=4))
    assert not saves.wait(3)
    assert len(written) == 2
    assert is_saved(saves, Position(step=4, epoch=1))
    assert found_in(tmp_path).metadata["position"]["epoch"] == 1, "it would test the epoch again"


def test_the_checkpoint_that_a_run_comes_from_is_not_written_again(tmp_path, start):
    saves = start(begun(), newest=3)
    assert saves.wait(3)
    assert is_saved(saves)
    assert not (tmp_path / "checkpoints").exists()


def test_one_that_failed_is_tried_again_when_it_matters(tmp_path, start, capsys):
    saves = start(begun())
    (tmp_path / "checkpoints").write_text("in the way")
    assert not is_saved(saves)
    (tmp_path / "checkpoints").unlink()
    assert is_saved(saves)
    assert found_in(tmp_path).step == 3
    assert saves.tracker.guard.counts[CHECKPOINT_WRITE] == 1
    assert capsys.readouterr().err.count("hvdtrain: warning: checkpoint write failed") == 1


def test_only_so_many_are_kept_and_the_best_apart(tmp_path, start):
    training = begun()
    list(training.epoch(Position()))
    saves = start(training, keep=2)
    for step in (1, 2, 3):
        saves.save(replace(MIDDLE, step=step))
        if step < 3:
            saves.save_best(replace(MIDDLE, step=step), eval_accuracy=step / 10)
    saves.wait(3)
    root = tmp_path / "checkpoints"
    assert names(root) == ["best-000000002", "step-000000002", "step-000000003"]
    best = checkpoint.open_one(root / "best-000000002")
    assert best.metadata == {"eval_accuracy": 0.2, "epoch": 1}
    weights = checkpoint.load(best, "weights")
    assert all(torch.equal(weights[name], one) for name, one in training.step.evaluated.state_dict().items())


def test_save_points_hear_of_each_save_and_how_long_it_held_the_training(tmp_path):
    points, training = Mock(), begun()
    record = record_of(SimpleNamespace(guard=Guard(), memory=dict, record_save=Mock()))
    saves = Saves(training.step, training.parts, folder_of(tmp_path), record, points, keep=2)
    saves.act_on(Decision(save=True, leave=False), Position(step=3))
    saves.wait(3)
    [held] = points.saved.mock_calls
    assert record.tracker.record_save.mock_calls == [held]


def test_replicas_that_differ_are_not_saved(tmp_path, start):
    def odd_one(value):
        odd = dict.fromkeys(value, 0) if isinstance(value, dict) else "another"
        return [value, value, odd]

    comm = Rank(0, 3)
    saves = start(begun(comm, batch_size_per_rank=4))
    comm.answers = odd_one
    assert ended(lambda: saves.save(MIDDLE)) == (REPLICAS_DIFFER, "replicas differ")
    assert not (tmp_path / "checkpoints").exists()


def test_states_of_ranks_that_do_not_fit_or_are_missing_are_refused_in_one_line(tmp_path, start):
    training = begun(runs_dir=tmp_path)
    saves = start(training)
    assert is_saved(saves)
    found = found_in(tmp_path)
    state = checkpoint.load(found, "state")
    for ranks in ({}, {"ranks/0": {}}, {"ranks/0": {"buffers": []}}, {"ranks/0": [1]}):
        checkpoint.write(tmp_path / "checkpoints", 3, {"state": state, **ranks}, metadata=found.metadata)
        with pytest.raises(BadInput, match="does not fit this run"):
            resume(training.parts, found_in(tmp_path))


@pytest.mark.parametrize(("loss", "status", "reason"), [("removed", 0, "preempted"), ("in the way", 1, "failed")])
def test_a_stop_ends_with_0_only_if_the_run_can_resume(tmp_path, start, loss, status, reason):
    saves, root = start(begun()), tmp_path / "checkpoints"
    assert is_saved(saves)
    checkpoint.remove(root)
    if loss == "in the way":
        root.write_text("a file")
    saves._metadata["config"]["run"] = "mine/"
    assert ended(lambda: saves.end_run(MIDDLE), r"stop" if status else r"--run mine/\S") == (status, reason)
    assert checkpoint.can_resume(root, 3) == (status == 0)


def test_a_run_that_has_lost_its_folder_to_another_saves_nothing_there(tmp_path, start):
    saves = start(begun())
    saves._hold = Mock(side_effect=OSError(16, "another run has taken its place"))
    saves.save(MIDDLE)
    saves.save_best(MIDDLE, eval_accuracy=1.0)
    with pytest.raises(EndOfRun, match="could not be written"):
        saves.end_run(MIDDLE)
    assert not list((tmp_path / "checkpoints").glob("*-*"))
