"""hvdtrain, docs/tutorials/own-model.md and docs/how-to/resume.md; a run's name and its saves are options."""

from dataclasses import dataclass

import digits
import fault
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.loop.hooks import Hook


@dataclass(frozen=True, kw_only=True)  # for faults
class Settings(hvdtrain.Settings):  # for faults
    hang_timeout_s: float | None = digits.TIMEOUT_S  # for faults


def losses(model, batch):
    return cross_entropy(model(fault.pixels(batch["inputs"])), batch["targets"], reduction="none")


class Step(Hook):
    def __init__(self, run):
        self.run = run

    def begin_step(self, number):
        fault.step(number, lambda: self.run.ranks.allgather(1))


def main(run):
    training = run.training(digits.model, losses, fault.data(0, 1280), digits.data(1280, 1408))
    training._loop.hooks = [*training._loop.hooks, Step(run)]
    for _ in training:
        pass
    fault.end(training.step.model)


fault.begin()
hvdtrain.start(main, Settings)
