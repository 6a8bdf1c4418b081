"""hvdlaunch tune with the real mpirun: the program of the documentation, starts that go wrong, and real training."""

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from launch.advice.tune.measure import Measurer
from launch.advice.tune.remedies import Catalogue, Remedy, ask_program
from launch.advice.tune.walk import Start, Wanted
from tests.mpi.conftest import EFFNET, PROJECT, environment, left_in
from tests.mpi.launched import finished
from tests.unit.machines import request

OPTIONS = ["--name", "mine", "-np", "2", "--gpus", "none"]
PAGE = PROJECT / "docs/how-to/tune.md"


def example(folder: Path) -> list[str]:
    """The program of the page, as it stands there."""
    [program] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (folder / "sums.py").write_text(program)
    return [sys.executable, str(folder / "sums.py")]


def tune(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return finished(folder, [sys.executable, "-m", "launch", "tune", *OPTIONS, *words])


def result(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "tunes/mine/tune.json").read_text())["result"])


@pytest.mark.slow
def test_the_program_of_the_page_is_tuned(tmp_path: Path) -> None:
    done = tune(tmp_path, "--", *example(tmp_path))
    assert done.returncode == 0, done.stderr
    found = result(tmp_path)
    assert [(one["name"], one["credited"]) for one in found["remedies"]] == [("larger chunks", True)]
    assert done.stdout.rstrip().endswith("--chunk 10000")
    assert len([*(tmp_path / "logs").iterdir()]) == 1


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Start]:
    """Start a program in a folder of its own, by which what is left running is found."""

    def started(program: tuple[str, ...], catalogue: Catalogue, wanted: Wanted, *, np: int, limit_s: float) -> Start:
        measurer = Measurer(
            request=request(np=np, program=program, as_root=True),
            catalogue=catalogue,
            environment=environment(tmp_path),
            job="job",
        )
        with monkeypatch.context() as inside:
            inside.chdir(tmp_path)
            return measurer.start(wanted, number=1, limit_s=limit_s)

    return started


@pytest.mark.parametrize(
    ("script", "problem"),
    [("raise SystemExit('it crashed')", "it crashed"), ("import time; time.sleep(1000)", "0 windows in 3 s")],
    ids=["crash", "hang"],
)
def test_a_start_that_goes_wrong_has_a_problem_and_leaves_nothing(
    tmp_path: Path, start: Callable[..., Start], script: str, problem: str
) -> None:
    remedy = Remedy(name="it", options=("--more",), what_for="computation", same_training=True)
    program = (sys.executable, "-c", script, str(tmp_path))
    began_s = time.monotonic()
    made = start(program, Catalogue(remedies=(remedy,)), Wanted(configuration=(remedy,), what=""), np=1, limit_s=3.0)
    assert problem in str(made.problem)
    assert str(made.problem).endswith("logs/job-1")
    assert (tmp_path / "logs/job-1/rank-0.log").exists()
    assert time.monotonic() - began_s < 60
    assert not left_in(tmp_path)
    assert not list(tmp_path.glob(".hvdlaunch-*"))


@pytest.mark.slow
def test_a_training_has_windows_and_shares_and_leaves_no_run_folder(
    tmp_path: Path, start: Callable[..., Start]
) -> None:
    words = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64"]
    program = (sys.executable, *EFFNET, *words)
    catalogue = ask_program(program, environment(tmp_path))
    made = start(program, catalogue, Wanted(configuration=(), profile=True, what=""), np=2, limit_s=200.0)
    assert made.problem is None
    assert made.rate > 0
    assert set(made.shares) == {"communication", "input"}
    assert made.epoch_samples == 1438
    assert not list((tmp_path / "runs").glob("*/*"))


OF_TRAINER = """
import json, sys
from torch import nn, randn
from transformers import Trainer, TrainingArguments

class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(4, 1)
    def forward(self, inputs, labels):
        return {"loss": nn.functional.mse_loss(self.line(inputs), labels)}

arguments = TrainingArguments(
    output_dir="out", use_cpu=True, max_steps=1000, eval_strategy="steps", eval_steps=1, save_strategy="steps",
    save_steps=1, load_best_model_at_end=True, report_to="none", disable_tqdm=True,
)
samples = [{"inputs": inputs, "labels": inputs.sum().view(1)} for inputs in randn(64, 4)]
print("what the script prints")
trainer = Trainer(model=Line(), args=arguments, train_dataset=samples, eval_dataset=samples)
trainer.train()
open(sys.argv[1], "w").write(json.dumps([trainer.state.global_step, arguments.per_device_train_batch_size]))
"""


@pytest.mark.slow
@pytest.mark.long  # four starts that import transformers; make test-slow tunes another program
def test_a_script_with_transformers_trainer_has_remedies_and_windows_and_takes_them(
    tmp_path: Path, start: Callable[..., Start]
) -> None:
    (tmp_path / "run.py").write_text(OF_TRAINER)
    program = (sys.executable, "-m", "hvdtrain.trainer", str(tmp_path / "run.py"), "end")
    catalogue = ask_program(program, environment(tmp_path))
    [larger] = [one for one in catalogue.remedies if one.options == ("--trainer.per_device_train_batch_size", "16")]
    made = start(program, catalogue, Wanted(configuration=(larger,), what=""), np=2, limit_s=100.0)
    assert made.problem is None
    assert made.rate > 0
    assert made.epoch_samples == 64
    assert 40 <= len(made.losses) <= 1000
    assert not list((tmp_path / "out").iterdir())
    more = ["--trainer.max_steps", "3", *larger.options]
    done = finished(tmp_path, [*program, *more])
    assert json.loads((tmp_path / "end").read_text()) == [3, 16], done.stderr
    assert finished(tmp_path, [*program, "--trainer.batch", "3"]).returncode == 2
