"""A whole training of one rank, without the handlers of its process."""

import shutil
from contextlib import ExitStack
from itertools import islice
from threading import Event

import torch
from torch import nn

import hvdtrain
from hvdtrain.program.start import Run
from hvdtrain.ranks.comm import SerialComm

SAMPLES = torch.arange(20.0)[:, None]


def visited(folder, *, steps, **changes):
    """The samples of an epoch that a run visits in so many steps, or to its end."""
    seen = []

    def losses(model, batch):
        if torch.is_grad_enabled():
            seen.extend(batch["inputs"].flatten().tolist())
        return model(batch["inputs"]).square().mean(1)

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


def test_a_run_that_resumes_with_another_batch_visits_what_is_left_once(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.safety.exits.install_stop_handlers", lambda *_, **__: Event())
    first = visited(tmp_path / "first", steps=3, batch_size_per_rank=4)
    shutil.copytree(tmp_path / "first", tmp_path / "rest")  # this process keeps the first one's lock
    rest = visited(tmp_path / "rest", steps=None, batch_size_per_rank=5)
    assert (len(first), len(rest)) == (12, 8)
    assert sorted(first + rest) == SAMPLES.flatten().tolist()
