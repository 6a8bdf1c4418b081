"""Train a model of your own: copy this file, and put your model, its loss and your data in.

    python own_model.py                                        one process, no MPI needed
    hvdlaunch run -np 2 -- python own_model.py --run a   two ranks, each with half of the samples
    hvdlaunch run -np 2 -- python own_model.py --run a   the same again resumes the run if it was interrupted
    hvdlaunch run -np 2 -- python own_model.py --stages 2 --accumulate-steps 2   two ranks, each with half of the layers

The result, in runs/own_model/<run>/result.json, is a test accuracy of 0.96. `--help` lists the options most used.
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

import hvdtrain


@dataclass(frozen=True, kw_only=True)
class Settings(hvdtrain.Settings):
    """A small network on scikit-learn's digits."""

    batch_size_per_rank: int = 32  # another default for an option that all programs have
    width: int = 128
    """Units of each hidden layer."""


class Digits(hvdtrain.Task):
    best, higher_is_better, means = "accuracy", True, ("accuracy",)

    def loss(self, model, batch, *, training):
        scores, digits = model(batch["pixels"]), batch["digits"]
        losses, is_right = cross_entropy(scores, digits, reduction="none"), scores.argmax(1) == digits
        count = losses.new_full((), len(digits))
        return hvdtrain.Sums(loss=losses.sum(), count=count, more={"accuracy": is_right.sum()})


def main(run: hvdtrain.Run[Settings]) -> None:
    width = run.settings.width
    pixels, digits = map(torch.tensor, load_digits(return_X_y=True))
    pixels, is_test = pixels.float() / 16, torch.arange(len(digits)) % 5 == 0
    training = run.training(
        lambda: nn.Sequential(
            nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10)
        ),
        Digits(),  # or a function of the model and a batch that returns the loss of each sample
        train={"pixels": pixels[~is_test], "digits": digits[~is_test]},
        test={"pixels": pixels[is_test], "digits": digits[is_test]},
    )
    for _ in training:  # each report and each epoch, the same on all ranks
        pass


if __name__ == "__main__":
    hvdtrain.start(main, Settings)
