"""A whole training of one rank, without the handlers of its process."""

import json
import shutil
from contextlib import ExitStack
from itertools import islice
from threading import Event

import pytest
import torch
from torch import nn

import hvdtrain
from hvdtrain.program.start import Run
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
