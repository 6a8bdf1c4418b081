"""A whole training of one rank, without the handlers of its process."""

import json
import shutil
import sys
from contextlib import ExitStack, suppress
from itertools import islice
from threading import Event

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.program.start import Run, run_to_end
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import EndOfRun

SAMPLES = torch.arange(20.0)[:, None]


def visited(folder, *, steps, factor=1.0, **changes):
    """The samples of an epoch that a run visits in so many steps, or to its end; its losses are times `factor`."""
    seen = []

    def losses(model, batch):
        if torch.is_grad_enabled():
            seen.extend(batch["inputs"].flatten().tolist())
        return model(batch["inputs"]).square().mean(1) * factor

    settings = hvdtrain.Settings(
        runs_dir=folder, experiment="e", run="r", epochs=1, report_every_steps=1, hang_timeout_s=0.0, **changes
    )
    with ExitStack() as stack:
        run = Run(SerialComm(), settings, stack)
        training = run.training(lambda: nn.Linear(1, 1), losses, SAMPLES, SAMPLES[:2])
        seen.clear()  # an epoch on CPUs has been timed
        for _ in islice(training, steps):
            pass
    return seen


@pytest.fixture(autouse=True)
def without_handlers(monkeypatch):
    monkeypatch.setattr("hvdtrain.safety.exits.install_stop_handlers", lambda *_, **__: Event())


@pytest.mark.parametrize(
    ("steps", "factor", "reason", "message"),
    [
        (0, 1.0, "not trained", "ended without a loop over run.training"),
        (None, torch.nan, "all steps skipped", "all 2 steps were skipped, so the model has learned nothing"),
    ],
)
def test_a_run_that_learns_nothing_fails(tmp_path, steps, factor, reason, message):
    with pytest.raises(EndOfRun, match=message) as end:
        visited(tmp_path, steps=steps, factor=factor, batch_size_per_rank=10)
    assert (end.value.status, end.value.reason) == (1, reason)
    assert json.loads((tmp_path / "e" / "r" / "result.json").read_text())["exit_reason"] == reason


def test_a_run_that_resumes_with_another_batch_visits_what_is_left_once(tmp_path):
    first = visited(tmp_path / "first", steps=3, batch_size_per_rank=4)
    shutil.copytree(tmp_path / "first", tmp_path / "rest")  # this process keeps the first one's lock
    rest = visited(tmp_path / "rest", steps=None, batch_size_per_rank=5)
    assert (len(first), len(rest)) == (12, 8)
    assert sorted(first + rest) == SAMPLES.flatten().tolist()


def ended(folder, body, losses=lambda model, batch: model(batch["inputs"]).square().mean(1)):
    """What a program with this body raises at its end, and the exit reason of its run."""

    def main(run):
        body(run.training(lambda: nn.Linear(1, 1), losses, SAMPLES, SAMPLES[:2]))

    settings = hvdtrain.Settings(
        runs_dir=folder,
        experiment="e",
        run="r",
        batch_size_per_rank=1,
        epochs=2,
        report_every_steps=1,
        hang_timeout_s=0,
    )
    error = None
    try:
        with ExitStack() as stack:
            run_to_end(main, Run(SerialComm(), settings, stack))
    except (Exception, SystemExit) as raised:  # noqa: BLE001
        error = raised
    result = folder / "e" / "r" / "result.json"
    return error, json.loads(result.read_text())["exit_reason"] if result.exists() else None


def swallow(training):
    with suppress(Exception):
        for _ in training:
            pass


def swallow_twice(training):
    swallow(training)
    swallow(training)


def leave(training):
    for _ in training:
        break


def leave_inside(training):
    for _ in training:
        leave(training)


def leave_by(code):
    def body(training):
        for _ in training:
            sys.exit(code)

    return body


def twice(training):
    assert [sum(1 for _ in training), sum(1 for _ in training)] == [21, 0]


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [
        (leave, 0, "preempted"),
        (leave_inside, 0, "preempted"),
        (leave_by(0), 0, "preempted"),
        (leave_by(None), 0, "preempted"),
        (leave_by(7), 7, "failed"),
        (twice, None, "finished"),
    ],
)
def test_a_loop_that_is_left_is_saved_and_resumes(tmp_path, monkeypatch, body, status, reason):
    monkeypatch.setattr("hvdtrain.safety.exits.install_stop_handlers", lambda *_, **__: Event())
    error, found = ended(tmp_path, body)
    assert (getattr(error, "status", getattr(error, "code", None)), found) == (status, reason)
    assert any((tmp_path / "e" / "r" / "checkpoints").glob("step-*"))


@pytest.mark.parametrize("body", [swallow, swallow_twice])
def test_a_program_that_catches_everything_keeps_the_status_of_its_training(tmp_path, monkeypatch, body):
    monkeypatch.setattr("hvdtrain.safety.exits.install_stop_handlers", lambda *_, **__: Event())
    error, reason = ended(tmp_path, body, lambda model, batch: model(batch["inputs"]).mean(1) * float("nan"))
    assert isinstance(error, EndOfRun)
    assert (error.status, reason) == (3, "too many skipped steps")


def test_a_program_that_catches_an_error_of_a_step_fails(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.safety.exits.install_stop_handlers", lambda *_, **__: Event())

    def body(training):
        def fail(*_):
            raise RuntimeError("a step")

        training.step.model.register_forward_pre_hook(fail)
        swallow(training)

    error, _ = ended(tmp_path, body)
    assert str(error) == "a step"
