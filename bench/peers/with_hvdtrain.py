"""hvdtrain, docs/tutorials/own-model.md and docs/how-to/resume.md; a run's name and its saves are options."""

from dataclasses import dataclass

import digits
import fault
from torch.nn.functional import cross_entropy

import hvdtrain


@dataclass(frozen=True, kw_only=True)  # for faults
class Settings(hvdtrain.Settings):  # for faults
    hang_timeout_s: float | None = digits.TIMEOUT_S  # for faults


def main(run):
    def losses(model, batch):
        if training and model.training:
            training.state["step"] = training.state.get("step", 0) + 1
            fault.step(training.state["step"], lambda: run.ranks.allgather(1))
        return cross_entropy(model(fault.pixels(batch["inputs"])), batch["targets"], reduction="none")

    model, training = digits.model(), None
    training = run.training(lambda: model, losses, fault.data(0, 1280), digits.data(1280, 1408))
    for _ in training:
        pass
    fault.end(model)


fault.begin()
hvdtrain.start(main, Settings)
