"""Does --on-spike skip save a run with poisoned batches (unscaled pixels, wrong labels)? A small net on the digits."""

import argparse
import json
import sys
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hvdtrain
from bench.jobs import job, mpirun
from bench.pairs import Case, Table, middle
from hvdtrain.core.task import Batch, Model

UNSCALED = 16.0  # the largest pixel, by which pixels are normally divided
POISONED = (100, 101, 200, 300, 301, 302)  # steps, on the last rank only
SIDES = {"clean": ("report", ()), "poisoned, report": ("report", POISONED), "poisoned, skip": ("skip", POISONED)}


class Digits(hvdtrain.Task):
    """Classification; the batches of some steps of this rank are poisoned."""

    best, higher_is_better, means = "accuracy", True, ("accuracy",)

    def __init__(self, poisoned: Collection[int]) -> None:
        self._poisoned, self._step = poisoned, 0

    def prepare(self, batch: Batch, samples: torch.Tensor, epoch: int | None) -> Batch:
        """Count the training batches."""
        if epoch is None:
            return batch
        self._step += 1
        if self._step not in self._poisoned:
            return batch
        return {"pixels": UNSCALED * batch["pixels"], "digits": (batch["digits"] + 1) % 10}

    def loss(self, model: Model, batch: Batch, *, training: bool) -> hvdtrain.Sums:
        """Return cross-entropy and the number of correct digits."""
        scores, digits = model(batch["pixels"]), batch["digits"]
        losses, is_right = cross_entropy(scores, digits, reduction="none"), scores.argmax(1) == digits
        count = losses.new_full((), len(digits))
        return hvdtrain.Sums(loss=losses.sum(), count=count, more={"accuracy": is_right.sum()})


def train(out: Path, *, words: Sequence[str], poisoned: Collection[int]) -> None:
    """Train on all ranks; only on the last one the batches of these steps are poisoned."""
    sys.argv = ["spikes", *words]

    def main(run: hvdtrain.Run[hvdtrain.Settings]) -> None:
        pixels, digits = map(torch.tensor, load_digits(return_X_y=True))
        pixels, is_test = pixels.float() / UNSCALED, torch.arange(len(digits)) % 5 == 0
        is_last = run.ranks.rank == run.ranks.size - 1
        training = run.training(
            lambda: nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)),
            Digits(poisoned if is_last else ()),
            train={"pixels": pixels[~is_test], "digits": digits[~is_test]},
            test={"pixels": pixels[is_test], "digits": digits[is_test]},
        )
        for _ in training:
            pass
        if run.ranks.rank == 0:
            out.write_text("{}")

    hvdtrain.start(main, hvdtrain.Settings)


def result_of(ranks: int, seed: int, on_spike: str, poisoned: tuple[int, ...], lr: float) -> dict[str, Any]:
    """Return one run's result.json."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", folder, "--run", "e/r", "--checkpoint-every", "0s"]
        words += ["--seed", str(seed), "--on-spike", on_spike, "--lr", str(lr), "--schedule", "constant"]
        job(mpirun(ranks), "cases.spikes:train", words=[*words, "--batch-size-per-rank", "32"], poisoned=poisoned)
        result: dict[str, Any] = json.loads((Path(folder) / "e" / "r" / "result.json").read_text())
        return result


def spikes(chosen: argparse.Namespace) -> Table:
    """Test accuracy of a run with poisoned batches, with and without --on-spike skip, compared with a run without.

    In 6 batches of one rank pixels are not scaled, and so 16 times as large, and labels are wrong. Changes are by seed.
    """
    conditions = f"{chosen.ranks} ranks, 575 steps, {len(POISONED)} of them poisoned on one rank, lr {chosen.lr}"
    table = Table(
        name="spikes",
        question=f"Digits, {conditions}:",
        columns=["run", "test accuracy %", "lowest", "change, points", "steps skipped"],
    )
    clean: list[float] = []
    for side, (on_spike, poisoned) in SIDES.items():
        results = [result_of(chosen.ranks, seed, on_spike, poisoned, chosen.lr) for seed in range(chosen.seeds)]
        values = [100 * (result["eval_accuracy"] or 0.0) for result in results]
        clean = clean or values
        change = middle([one - other for one, other in zip(values, clean, strict=True)])
        skipped = sorted({result["skipped_steps"] for result in results})
        table.add(side, middle(values), min(values), change, ", ".join(map(str, skipped)))
    return table


CASES = {"spikes": Case(measure=spikes, options={"ranks": 2, "seeds": 5, "lr": 0.1})}
