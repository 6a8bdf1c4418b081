"""The first day on a GPU: what is claimed of GPUs, tried stage after stage, each ended after nine minutes.

    make gpu-day                               every stage that has not ended well yet
    make gpu-day DAY="step b7"                 these, again
    python bench/run.py gpu-day --rehearse     every command once, small and on the CPU; figures are dropped

Without a network first install what `make wheels` made: pip install --no-index --no-deps dist/*.whl. A stage that
cannot run is NOT RUN, with the reason. Logs are in build/gpu-day/.
"""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.jobs import HERE, environment
from bench.pairs import RESULTS, Case, Table

SAVE_S = 60.0  # for a run that is ended, to save
CIFAR10 = Path("data/cifar-10-batches-py")
REFERENCE = "one A100, on CIFAR-10: 707 s, 4900 steps, 1768 images/s, accuracy 78.76 %"
Figures = dict[str, Any]


class StageError(Exception):
    """A command of a stage has failed."""


class NotRunError(Exception):
    """What a stage lacks on this machine."""


@dataclass(kw_only=True)
class Day:
    """A stage at work: it starts programs, whose output is in its log, until its time is over."""

    folder: Path
    log: Path
    rehearsal: bool
    limit_s: float

    def __post_init__(self) -> None:
        self.log.unlink(missing_ok=True)
        self._end = time.monotonic() + self.limit_s

    def call(self, *words: str, saves: bool = False) -> None:
        """Run Python with these words, which must succeed; one that `saves` may be ended at the limit."""
        command = [sys.executable, *words]
        with self.log.open("a") as log:
            print(f"$ {shlex.join(command)}", file=log, flush=True)
            how: dict[str, Any] = {"stdout": log, "stderr": log, "cwd": self.folder, "env": environment()}
            process = subprocess.Popen(command, start_new_session=True, **how)
        try:
            ended = process.wait(max(0.0, self._end - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGTERM)
            ended = process.wait(SAVE_S)
            if not saves:
                raise StageError(f"not done after {self.limit_s:.0f} s: {shlex.join(words)}") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        if ended:
            raise StageError(f"exit status {ended}: {shlex.join(words)}")


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What is claimed, and what tries it."""

    question: str
    run: Callable[[Day], Figures]


def tests(day: Day) -> Figures:
    day.call("-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", f"{HERE.parent}", f"{HERE.parent}/tests/gpu")
    return {"pytest": day.log.read_text().splitlines()[-1]}


def by_case(question: str, name: str, small: str, words: str, *, gpus: int = 1) -> Stage:
    """Another case, whose rows are the figures; a rehearsal takes the small words."""

    def run(day: Day) -> Figures:
        if torch.cuda.device_count() < gpus and not day.rehearsal:
            raise NotRunError(f"needs {gpus} GPUs")
        day.call(f"{HERE}/run.py", name, *(small if day.rehearsal else words).split())
        rows = json.loads((day.folder / RESULTS / f"{name}.json").read_text())["rows"]
        return {str(number): row for number, row in enumerate(rows)}

    return Stage(question=question, run=run)


def b7(day: Day) -> Figures:
    data = ["cifar10", "--data-dir", str(Path("data").resolve())] if CIFAR10.is_dir() else ["synthetic"]
    weights = any(Path("~/.cache/torch/hub/checkpoints").expanduser().glob("efficientnet_b7*"))
    words = ["--data", *data, "--epochs", "25", "--pretrained", "hub" if weights else "none"]
    if day.rehearsal:
        words = ["--data", "digits", "--model", "efficientnet_tiny", "--epochs", "1", "--pretrained", "none"]
    day.call("-m", "hvdtrain.effnet", "--recipe", "book", "--run", "b7", *words, saves=True)
    result = json.loads((day.folder / "runs/effnet/b7/result.json").read_text())
    figures = {name: result[name] for name in ("steps", "wall_time_s", "train_images_per_s", "eval_accuracy")}
    state = "OK" if result["exit_reason"] == "finished" else "GOES ON"
    return {"state": state, "data": data[0], "ImageNet weights": weights, **figures, "reference": REFERENCE}


B0 = "--models efficientnet_b0:256 --pixels 224 --np 1"
MLP = "--models mlp:8 --np 1 --rounds 1 --steps 2"
STAGES = {
    "tests": Stage(question="Do tests/gpu pass?", run=tests),
    "step": by_case("Our step beside a plain loop and DDP", "step", MLP, f"{B0} --precision bf16"),
    "compiled": by_case("The same, compiled", "step", f"{MLP} --compile", f"{B0} --precision bf16 --compile"),
    "memory": by_case("Memory that is reserved", "memory", MLP, B0),
    "overhead": by_case("Our loop beside the shortest", "overhead", "--model mlp --batch 4 --pairs 2", "--batch 256"),
    "sums": by_case("Sums over two GPUs", "all-reduce", "--rounds 1 --repeats 2 --sizes 1KB", "--rounds 3", gpus=2),
    "input": by_case("How fast images come", "input", "--rounds 1 --images 8 --drawn 512", "--rounds 3 --images 1000"),
    "b7": Stage(question="b7, 25 epochs beside the reference; without CIFAR-10 for the time alone", run=b7),
}


def outcome(stage: Stage, day: Day) -> dict[str, Any]:
    """Run a stage if it can run: its row."""
    row = {"question": stage.question, "log": str(day.log)}
    if not torch.cuda.is_available() and not day.rehearsal:
        return {**row, "state": "NOT RUN", "figures": "no GPU"}
    started = time.monotonic()
    try:
        figures = stage.run(day)
        state = figures.pop("state", "OK")
        row |= (
            {"state": "REHEARSED", "figures": ""} if day.rehearsal else {"state": state, "figures": in_words(figures)}
        )
    except NotRunError as error:
        return {**row, "state": "NOT RUN", "figures": str(error)}
    except Exception as error:  # noqa: BLE001 (the others are to run)
        row |= {"state": "FAILED", "figures": f"{type(error).__name__}: {error}"}
    return {**row, "s": round(time.monotonic() - started, 1)}


def in_words(value: Any) -> str:
    """A figure, numbers to four digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_words(one)}" for name, one in value.items())
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def gpu_day(chosen: argparse.Namespace) -> Table:
    """What is claimed of GPUs, in stages of under ten minutes that go on where they were cut off.

    --stages names some; otherwise all run that have not ended well yet. Status 1 if a stage has failed.
    """
    table = Table(
        name="gpu-day-rehearsal" if chosen.rehearse else "gpu-day",
        question="The first day on a GPU: what is claimed of GPUs, stage by stage.",
        columns=["stage", "question", "state", "figures", "s", "log"],
    )
    kept = RESULTS / f"{table.name}.json"
    rows = {row["stage"]: row for row in json.loads(kept.read_text())["rows"]} if kept.exists() else {}
    unfinished = [name for name in STAGES if rows.get(name, {}).get("state") not in ("OK", "REHEARSED")]
    folder = Path("build", table.name).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    for name in chosen.stages or unfinished:
        day = Day(folder=folder, log=folder / f"{name}.log", rehearsal=chosen.rehearse, limit_s=chosen.limit_s)
        rows[name] = {"stage": name, **outcome(STAGES[name], day)}
        print(f"{name}: {rows[name]['state']} {rows[name]['figures']}", flush=True)
        table.rows = [rows[known] for known in STAGES if known in rows]
        table.write()
    table.holds = all(row["state"] != "FAILED" for row in table.rows)
    return table


CASES = {
    "gpu-day": Case(measure=gpu_day, options={"stages": ([], list(STAGES)), "rehearse": False, "limit-s": 540.0}),
}
