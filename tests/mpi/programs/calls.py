"""A training in which rank 1 departs from the calls of the others, as the first word says."""

import os
import signal
import sys
import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

import hvdtrain

departure = sys.argv.pop(1) if __name__ == "__main__" else ""
inputs = torch.randn(160, 8, generator=torch.Generator().manual_seed(0))
targets = inputs[:, :4].argmax(1)


@dataclass(frozen=True, kw_only=True)
class Settings(hvdtrain.Settings):
    hang_timeout_s: float | None = 2.0


def losses(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")


def main(run):
    is_odd = run.ranks.rank == 1
    training = run.training(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        losses,
        (inputs[:128], targets[:128]),
        (inputs[128:], targets[128:]),
    )
    for number, _ in enumerate(training, start=1):
        departs = is_odd and number == 6
        if (departure == "extra" and departs) or (departure == "skip" and not departs):
            run.ranks.allreduce(torch.ones(2), "own.metric")
        if departure == "stop" and departs:
            os.kill(os.getpid(), signal.SIGSTOP)
        while departure == "loop" and departs:
            time.sleep(0.1)
        if departure == "leave" and departs:
            os._exit(7)


if __name__ == "__main__":
    hvdtrain.start(main, Settings)
