"""A run that is asked to leave, wherever it is: it saves there, leaves with 0, and goes on to the same weights."""

import faulthandler
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.core.position import Position
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.save_points import AgreedSavePoints, Decision
from hvdtrain.safety import exits
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.guard import Guard
from hvdtrain.safety.watchdog import OFF
from hvdtrain.tracking.console import Console
from hvdtrain.tracking.tracker import Tracker
from tests.refusals import ended
from tests.unit.checkpoint.checkpoints import folder_of, record_of
from tests.unit.loop.trainings import begun, same, train


class Asking(Faults):
    """Asks the run to leave at a place."""

    def __init__(self, place, leave):
        super().__init__(None, ())
        self._place, self._leave = place, leave

    def inflict_at(self, place, number=0, *, model=None):
        if f"{place}{number}" == self._place:
            self._leave.set()


def trained(folder, leave, faults=NONE):
    """A run of 8 steps to its end or until it has left: the training."""
    training = begun(epochs=2)
    found, _ = checkpoint.find_newest(folder / "checkpoints")
    position = Position() if found is None else resume(training.parts, found)
    (folder / "ranks").mkdir(exist_ok=True)
    tracker = Tracker(folder, is_writer=False, task=training.step.task, result={})
    tracker.memory = dict
    run = SimpleNamespace(faults=faults, console=Console(is_shown=False), tracker=tracker, watch=OFF)
    points = AgreedSavePoints(training.step.slots.comm, leave, every_s=0, every_steps=3)
    opened = folder_of(folder, newest=position.step or None)
    saves = Saves(training.step, training.parts, opened, run, points, keep=2)
    try:
        train(training, Progress(position), saves=saves, run=run)
    finally:
        saves._writer.wait()
    return training


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("whole"), threading.Event())


@pytest.mark.parametrize(("place", "step"), [("step6", 6), ("save2", 7), ("eval1", 4)])
def test_a_run_that_is_asked_saves_where_it_stands_and_goes_on_to_the_same_weights(
    tmp_path, uninterrupted, place, step
):
    leave = threading.Event()
    assert ended(lambda: trained(tmp_path, leave, Asking(place, leave))) == (0, "preempted")
    assert checkpoint.find_newest(tmp_path / "checkpoints")[0].step == step
    assert same(trained(tmp_path, threading.Event()), uninterrupted)


def test_save_points_hear_of_each_save_and_how_long_it_held_the_training(tmp_path):
    points, training = Mock(), begun()
    record = record_of(SimpleNamespace(guard=Guard(), memory=dict, record_save=Mock()))
    saves = Saves(training.step, training.parts, folder_of(tmp_path), record, points, keep=2)
    saves.obey(Decision(save=True, leave=False), Position(step=3))
    saves.wait(3)
    assert points.saved.mock_calls == record.tracker.record_save.mock_calls


@pytest.fixture
def stops(tmp_path, monkeypatch):
    """What a rank sets up for signals: the event of one that asks it to leave, and how it has ended."""
    handlers, files, ends = {number: signal.getsignal(number) for number in exits.STOP_SIGNALS}, [], []
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(faulthandler, "enable", lambda file, **_: files.append(file))
    monkeypatch.setattr(exits, "_exit_on_failure", ends.append)
    for name in exits.RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    yield exits.install_stop_handlers(tmp_path / "rank-0.err", ends.append, step=lambda: None), ends
    files[0].close()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


def test_a_signal_that_comes_twice_at_once_is_one(stops):
    """As timeout(1) sends it to its program and then to the group; a later one ends the run."""
    leave, ends = stops
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        assert leave.wait(10)
    time.sleep(exits._DUPLICATE_S + 0.05)
    assert ends == []
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    assert ends == ["interrupted", 130]
