"""A signal that asks a run to leave, wherever it is: it saves there, leaves with 0, and goes on to the same weights."""

import faulthandler
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.core.position import Position
from hvdtrain.feed.feed import Feed
from hvdtrain.feed.order import BatchSizes
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Reports
from hvdtrain.loop.save_points import AgreedSavePoints
from hvdtrain.program.assembly import measures_of
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety import exits
from hvdtrain.safety.exits import EndOfRun
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.text.sequences import Sequences
from hvdtrain.text.task import Labels
from hvdtrain.tracking.console import SILENT
from hvdtrain.tracking.gauges import Gauges, read_nothing
from hvdtrain.tracking.tracker import Tracker
from tests.steps import CPU, rate_of, step_of
from tests.unit.loop.trainings import Begun, begun, same, train
from tests.unit.text.berts import classifier

SEP = 3


def images():
    """With batch norm; 4 steps per epoch."""
    return begun(epochs=2)


def texts():
    """Without it; 4 steps per epoch."""
    lengths = np.arange(2, 10)
    tokens = np.random.default_rng(0).integers(5, 12, lengths.sum(), dtype=np.uint16)
    starts = np.cumsum([0, *lengths[:-1]])
    split = Sequences(tokens, starts=starts, lengths=lengths, labels=np.arange(len(lengths)) % 3)
    task, model, comm = Labels(split.lengths, classes=3, end=SEP), classifier(), SerialComm()
    sizes = BatchSizes(micro_batch=2, global_batch=2, steps_per_epoch=4)
    step = step_of(model, task=task, comm=comm)
    return Begun(
        config=SimpleNamespace(epochs=2, max_steps=None, seed=0),
        images=SimpleNamespace(train=split, test=split),
        step=step,
        feed=Feed(split, task, comm, sizes, seed=0, device=CPU),
        lr=rate_of(0.01, 8),
        limits=Limits(step, max_skipped_steps=1, check_replicas_every=0),
        reports=Reports(comm, lambda _: Gauges(read_nothing), task, every_steps=100, device=CPU),
    )


class Asking(Faults):
    """Sends a signal to this process at a place, and waits until it is heard."""

    def __init__(self, number, place, leave):
        super().__init__(None, ())
        self._number, self._place, self._stop_requested = number, place, leave

    def inflict_at(self, place, number=0, *, model=None):
        if f"{place}{number}" == self._place:
            os.kill(os.getpid(), self._number)
            assert self._stop_requested.wait(10)


@pytest.fixture(scope="module")
def set_up(tmp_path_factory):
    handlers, files, ends = {number: signal.getsignal(number) for number in exits.STOP_SIGNALS}, [], []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "excepthook", sys.excepthook)
        patch.setattr(faulthandler, "enable", lambda file, **_: files.append(file))
        patch.setattr(exits, "_exit_on_failure", ends.append)
        patch.setattr(exits, "_DUPLICATE_S", 0.0)  # one test asks soon after another
        for name in exits.RANK_VARIABLES:
            patch.delenv(name, raising=False)
        leave = exits.install_stop_handlers(
            tmp_path_factory.mktemp("stops") / "rank-0.err", ends.append, step=lambda: None
        )
        yield leave, ends
    files[0].close()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture
def stops(set_up):
    """What a rank sets up for these signals: the event of one that asks it to leave, and how it has ended."""
    for one in set_up:
        one.clear()
    return set_up


def trained(folder, kind, leave, faults=NONE):
    """A run to its end or until it has left: the training."""
    torch.manual_seed(0)
    training = kind()
    found, _ = checkpoint.find_newest(folder / "checkpoints")
    position = Position() if found is None else resume(training.parts, found)
    (folder / "ranks").mkdir(exist_ok=True)
    tracker = Tracker(folder, is_writer=False, measures=measures_of(training.step.task), result={})
    saves = Saves(
        training.parts,
        folder / "checkpoints",
        about={},
        memory=dict,
        guard=tracker.guard,
        keep=2,
        newest=position.step or None,
        faults=faults,
    )
    run = SimpleNamespace(
        folder=folder,
        faults=faults,
        console=SILENT,
        tracker=tracker,
    )
    try:
        points = AgreedSavePoints(training.step.slots.comm, leave, every_s=0, every_steps=3)
        train(training, Progress(position), saves=saves, points=points, run=run)
    finally:
        saves._writer.wait()
    return training


@pytest.fixture(scope="module", params=[images, texts])
def uninterrupted(request, tmp_path_factory):
    """A kind of training, and its end when nobody asks."""
    return request.param, trained(tmp_path_factory.mktemp("whole"), request.param, threading.Event())


@pytest.mark.parametrize(
    ("number", "place", "step"),
    [
        pytest.param(number, place, step, marks=[pytest.mark.slow] * (one != other))
        for one, number in enumerate(exits.STOP_SIGNALS)
        for other, (place, step) in enumerate((("step6", 6), ("save2", 7), ("eval1", 4)))
    ],
)
def test_a_run_that_is_asked_saves_where_it_stands_and_goes_on_to_the_same_weights(  # noqa: PLR0917
    tmp_path, stops, uninterrupted, number, place, step
):
    (leave, ends), (kind, whole) = stops, uninterrupted
    with pytest.raises(EndOfRun) as left:
        trained(tmp_path, kind, leave, Asking(number, place, leave))
    assert (left.value.status, left.value.reason, ends) == (0, "preempted", [])
    assert checkpoint.find_newest(tmp_path / "checkpoints")[0].step == step
    leave.clear()
    assert same(trained(tmp_path, kind, leave), whole)


def test_a_signal_that_comes_twice_at_once_is_one(stops, monkeypatch):
    """As timeout(1) sends it to its program and then to the group; a later one ends the run."""
    monkeypatch.setattr(exits, "_DUPLICATE_S", 0.3)
    leave, ends = stops
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
        assert leave.wait(10)
    time.sleep(0.35)
    assert ends == []
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0.1)
    assert ends == ["interrupted", 130]
