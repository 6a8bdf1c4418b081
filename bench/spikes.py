"""One rank of a small network on the digits, with poisoned batches: unscaled pixels and wrong labels."""

import sys
from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.core.task import Batch, Model

UNSCALED = 16.0  # the largest pixel, by which pixels are normally divided


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
