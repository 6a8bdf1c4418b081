"""A program that fills a slot of its own and adds a witness of its own; the first word is the folder of what they saw.

hvdtrain knows neither of them: the settings of the program name them.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import mse_loss

import hvdtrain
from hvdtrain.core.every_step import EveryStep
from hvdtrain.core.step import Witness


class EverySecondStep(EveryStep):
    """What all ranks do together, a checkpoint for example, they do after every second step only."""

    def __init__(self):
        self.synced = []

    def syncs_after(self, step, *, last):
        return step % 2 == 0

    def sync(self, step, end):
        self.synced.append(step)
        return end


class Counts(Witness):
    """Of steps, and of the values that the forward passes have made."""

    def __init__(self):
        self.begun = self.ended = self.values = 0

    def begin(self, step):
        self.begun += 1

    def pass_on(self, values):
        self.values += values.numel()
        return values

    def end(self, step):
        self.ended += 1


when, counts = EverySecondStep(), Counts()


@dataclass(frozen=True, kw_only=True)
class Settings(hvdtrain.Settings):
    batch_size_per_rank: int = 8
    epochs: int = 2
    checkpoint_every: str = "1steps"
    keep: int = 100

    def fill(self, draft):
        draft.when = when
        draft.witnesses.append(counts)


def losses(model, batch):
    return mse_loss(model(batch["inputs"]), batch["targets"], reduction="none").mean(1)


def main(run):
    samples = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
    for _ in run.training(lambda: nn.Linear(4, 2), losses, (samples, samples[:, :2]), (samples[:8], samples[:8, :2])):
        pass
    answer = {"synced": when.synced, "begun": counts.begun, "ended": counts.ended, "values": counts.values}
    (folder / f"rank-{run.ranks.rank}.json").write_text(json.dumps(answer))


if __name__ == "__main__":
    folder = Path(sys.argv.pop(1))
    hvdtrain.start(main, Settings)
