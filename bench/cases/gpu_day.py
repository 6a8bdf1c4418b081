"""A day on a GPU: what needs hours, CIFAR-10 or two GPUs, in stages of nine minutes; for the rest see bench/quarter.

    make gpu-day                               every stage that has not succeeded yet
    make gpu-day DAY="kernels b7"              these stages again
    python bench/run.py gpu-day --rehearse     every command once, small and on the CPU; figures are dropped

A stage that cannot run is NOT RUN, with the reason and without figures. The page is build/bench/gpu-day.md, logs are in
build/gpu-day/.
"""

import argparse
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.jobs import HERE, environment
from bench.pairs import RESULTS, Case, Table

SAVE_S = 60.0  # time to save for a run that is ended
CIFAR10 = Path("data/cifar-10-batches-py")
DIGITS = ("--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64")
TRAIN = ("-m", "hvdtrain.effnet", "--run")
PHOTOS = "import sys, pathlib; from bench.cases.input import make; make(pathlib.Path(sys.argv[1]), int(sys.argv[2]))"
REFERENCE = "one A100, on CIFAR-10: 707 s, 4900 steps, 1768 images/s, accuracy 78.76 %"
Figures = dict[str, Any]


class StageError(Exception):
    """A stage's claim does not hold, or one of its commands has failed."""


class NotRunError(Exception):
    """A requirement of a stage is missing on this machine."""


@dataclass(kw_only=True)
class Day:
    """A running stage: it starts programs, with output in its log, until its time is over."""

    folder: Path
    log: Path
    rehearsal: bool
    limit_s: float

    def __post_init__(self) -> None:
        self.log.unlink(missing_ok=True)
        self._end = time.monotonic() + self.limit_s

    def call(self, *words: str, saves: bool = False) -> None:
        """Run Python with these arguments, which must succeed; a program that `saves` may be ended at the limit."""
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
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # also what it leaves behind, which would hold the GPU
        if ended:
            raise StageError(f"exit status {ended}: {shlex.join(words)}")

    def rows(self, name: str, small: str, words: str, *more: str) -> list[Figures]:
        """Return the rows of another case; a rehearsal uses the `small` arguments."""
        self.call(f"{HERE}/run.py", name, *(small if self.rehearsal else words).split(), *more)
        found: list[Figures] = json.loads((self.folder / RESULTS / f"{name}.json").read_text())["rows"]
        return found

    def train(self, run: str, *words: str, goes_on: bool = False) -> Figures:
        """Return the result of a run of hvdtrain.effnet, with the speed of its last epoch; resumed if `goes_on`."""
        folder = self.folder / "runs/effnet" / run
        if not goes_on:
            shutil.rmtree(folder, ignore_errors=True)
        self.call(*TRAIN, run, *words, saves=goes_on)
        lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
        speeds = [line["train/images_per_s"] for line in lines if "epoch" in line]
        result: Figures = json.loads((folder / "result.json").read_text())
        return {**result, "images/s of the last epoch": speeds[-1] if speeds else None}


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A claim, and the function that tests it."""

    question: str
    run: Callable[[Day], Figures]


def by_case(question: str, name: str, small: str, words: str, *, gpus: int = 1) -> Stage:
    """Use the rows of another case as figures."""

    def run(day: Day) -> Figures:
        if torch.cuda.device_count() < gpus and not day.rehearsal:
            raise NotRunError(f"needs {gpus} GPUs")
        return {"rows": day.rows(name, small, words)}

    return Stage(question=question, run=run)


def jpegs(day: Day) -> Figures:
    count = "8" if day.rehearsal else "1000"
    rows = day.rows("input", "--rounds 1 --drawn 512", "--rounds 3", "--images", count)
    photos = day.folder / "photos"
    shutil.rmtree(photos, ignore_errors=True)
    day.call("-c", PHOTOS, str(photos), count)
    small = ["--model", "efficientnet_tiny", "--batch-size-per-rank", "4", "--epochs", "1"]
    words = small if day.rehearsal else ["--precision", "bf16", "--epochs", "3"]
    result = day.train("photos", "--data", "imagefolder", "--data-dir", str(photos), "--profile", *words)
    return {"images/s in training": result["images/s of the last epoch"], "read": rows}


def cifar10(day: Day) -> Figures:
    words = ["--data", "cifar10", "--data-dir", str(CIFAR10.parent.resolve()), "--epochs", "10"]
    if day.rehearsal:
        words = [*DIGITS, "--epochs", "1"]
    elif not CIFAR10.is_dir():
        raise NotRunError(f"no {CIFAR10}")
    result = day.train("cifar10", *words, "--precision", "bf16")
    return {name: result[name] for name in ("eval_accuracy", "wall_time_s", "train_images_per_s")}


def b7(day: Day) -> Figures:
    data = ["cifar10", "--data-dir", str(CIFAR10.parent.resolve())] if CIFAR10.is_dir() else ["synthetic"]
    weights = any(Path("~/.cache/torch/hub/checkpoints").expanduser().glob("efficientnet_b7*"))
    words = ["--data", *data, "--model", "efficientnet_b7", "--epochs", "25"]
    words += ["--pretrained", "hub" if weights else "none"]
    if day.rehearsal:
        words = [*DIGITS, "--epochs", "1", "--pretrained", "none"]
    result = day.train("b7", "--recipe", "book", *words, goes_on=True)
    figures = {name: result[name] for name in ("steps", "wall_time_s", "train_images_per_s", "eval_accuracy")}
    state = "OK" if result["exit_reason"] == "finished" else "GOES ON"
    return {"state": state, "data": data[0], "ImageNet weights": weights, **figures, "reference": REFERENCE}


TINY = "efficientnet_tiny:32:2:bf16"
SHAPES = ("efficientnet_b0:224:256", "efficientnet_b4:380:64", "efficientnet_b7:600:16")
SHAPES_BY_PRECISION = " ".join(f"{shape}:{one}" for shape in SHAPES for one in ("tf32", "bf16", "fp16"))
STAGES = {
    "two-gpus": by_case("Sums by NCCL over two GPUs", "sums", "--np 2 --cycles-ms 1", "--np 2", gpus=2),
    "kernels": by_case(
        "Time, kernels and memory of a step: a plain loop's, and ours of a BERT",
        "kernels",
        f"--steps {TINY} bert_tiny:32:2:bf16",
        f"--steps {SHAPES_BY_PRECISION} bert_base:128:32:bf16",
    ),
    "jpegs": Stage(question="JPEGs: read as fast as computed?", run=jpegs),
    "cifar10": Stage(question="CIFAR-10, 10 epochs of the default recipe", run=cifar10),
    "b7": Stage(question="b7, 25 epochs beside the reference; without CIFAR-10 for the time alone", run=b7),
}


def outcome(stage: Stage, day: Day) -> dict[str, Any]:
    """Run a stage if possible, and return its row."""
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
    except Exception as error:  # noqa: BLE001 (the other stages must run)
        row |= {"state": "FAILED", "figures": f"{type(error).__name__}: {error}"}
    return {**row, "s": round(time.monotonic() - started, 1)}


def in_words(value: Any) -> str:
    """Format a figure; numbers have four digits."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {in_words(one)}" for name, one in value.items())
    if isinstance(value, list):
        return "; ".join(in_words(one) for one in value)
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def gpu_day(chosen: argparse.Namespace) -> Table:
    """Hours on a GPU, in stages of under ten minutes that resume after an interruption.

    --stages names some; otherwise all stages run that have not succeeded yet. Status 1 if a stage has failed.
    """
    table = Table(
        name="gpu-day-rehearsal" if chosen.rehearse else "gpu-day",
        question="A day on a GPU, stage by stage.",
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


OPTIONS = {"stages": ([], list(STAGES)), "rehearse": False, "limit-s": 540.0}
CASES = {"gpu-day": Case(measure=gpu_day, options=OPTIONS)}
