"""Find the ink in noisy digits; the training ends when a metric of its own, the IoU, has not improved for some epochs.

python early_stopping.py                            one process, no MPI needed
hvdlaunch run -np 2 -- python early_stopping.py --run a   two ranks; the same again resumes the run, with its patience
"""

from dataclasses import dataclass

import torch
from sklearn.datasets import load_digits
from torch import nn

import hvdtrain


@dataclass(frozen=True, kw_only=True)
class Settings(hvdtrain.Settings):
    """A small convolutional network that marks the ink of digits."""

    batch_size_per_rank: int = 32
    width: int = 8
    patience: int = 2
    """Epochs without an IoU that is 0.001 better, after which the training ends."""


class Ink(hvdtrain.Task):
    unit, best, higher_is_better = "images", "iou", True

    def loss(self, model, batch, *, training):
        scores, ink = model(batch["inputs"]), batch["targets"]
        losses = nn.functional.binary_cross_entropy_with_logits(scores, ink, reduction="none").mean((1, 2, 3))  # (N,)
        more = {"both": ((scores > 0) & (ink > 0)).sum(), "either": ((scores > 0) | (ink > 0)).sum()}
        return hvdtrain.Sums(loss=losses.sum(), count=losses.new_full((), len(ink)), more=more)

    def metrics(self, totals):  # of the sums over all ranks
        return {**super().metrics(totals), "iou": totals["both"] / max(1, totals["either"])}


def main(run: hvdtrain.Run[Settings]) -> None:
    digits, width = torch.tensor(load_digits().images).float()[:, None] / 16, run.settings.width  # (S, 1, 8, 8)
    noisy = digits + 0.4 * torch.randn(digits.shape, generator=torch.Generator().manual_seed(0))
    ink, is_test = (digits > 0.3).float(), torch.arange(len(digits)) % 5 == 0
    training = run.training(
        lambda: nn.Sequential(nn.Conv2d(1, width, 3, padding=1), nn.ReLU(), nn.Conv2d(width, 1, 3, padding=1)),
        Ink(),
        train=(noisy[~is_test], ink[~is_test]),  # values without names are "inputs" and "targets"
        test=(noisy[is_test], ink[is_test]),
    )
    best, bad = training.state.get("patience", (0.0, 0))  # of the checkpoint from which the run resumes
    for item in training:
        if isinstance(item, hvdtrain.EpochDone):
            best, bad = (item.test["iou"], 0) if item.test["iou"] > best + 0.001 else (best, bad + 1)
            training.state["patience"] = best, bad
            training.log("patience/bad_epochs", bad)
            if bad >= run.settings.patience:
                training.stop(f"no better IoU than {best:.3f} for {bad} epochs")


if __name__ == "__main__":
    hvdtrain.start(main, Settings)
