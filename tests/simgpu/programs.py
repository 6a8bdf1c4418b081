"""The project's programs, put together by the project itself up to step and feed, without a run around them."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from hvdtrain import bert, effnet
from hvdtrain.core.pending import Pending
from hvdtrain.core.phases import OFF
from hvdtrain.core.position import Position
from hvdtrain.loop.feed.feed import Feed
from hvdtrain.loop.feed.order import RankBatch
from hvdtrain.loop.stragglers import OwnTime
from hvdtrain.program import assembly
from hvdtrain.program import settings as program_settings
from hvdtrain.program.checks import require_job
from hvdtrain.program.job import make_job
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.tasks.text import settings as texts
from hvdtrain.tasks.vision import settings as images
from tests.simgpu.cases import EFFNET, FUNCTION

SCALE = 256.0  # of the loss in fp16: no step is skipped


def by_function(run: Any) -> None:
    """A program whose task is a function of the model and a batch."""
    inputs = torch.randn(200, 8, generator=torch.Generator().manual_seed(0))
    targets = inputs[:, :4].argmax(1)

    def losses(model: Any, batch: Any) -> torch.Tensor:
        return cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))

    data = {"inputs": inputs, "targets": targets}
    for _ in run.training(make, losses, train=data, test=data):
        pass


def parse(program: str, words: Sequence[str]) -> Settings:
    """The settings of a program's command line."""
    if program == FUNCTION:
        return program_settings.parse(words, [Settings])
    return (images if program == EFFNET else texts).parse(words)


def main_of(program: str) -> Any:
    """The function that is given the run."""
    if program == FUNCTION:
        return by_function
    return (effnet if program == EFFNET else bert).main


class Prepared:
    """One rank of a program that is ready to train: what `main` takes for its run."""

    def __init__(self, program: str, words: Sequence[str], comm: Comm, device: torch.device) -> None:
        self.ranks, self.device = comm, device
        self.settings = parse(program, words)
        main_of(program)(self)

    def agree(self, decide: Any) -> Any:
        return agree(self.ranks, decide)

    def training(
        self, model: Any, task: Any, train: Any, test: Any, *, cuts: Any = None, max_steps: int | None = None, **_: Any
    ) -> "Prepared":
        """As Run.training and Training put a step together."""
        given = {"model": model, "task": task, "data": (train, test), "cuts": cuts, "max_steps": max_steps}
        job, self.test = make_job(self.ranks, self.settings, self.device, **given)
        require_job(self.settings, job)
        job = replace(job, phases=OwnTime(OFF, self.device))
        rate = assembly.rate_of(self.settings, job)
        self.job, self.lr = job, rate.peak
        self.step = assembly.build_step(self.settings, job, assembly.place(self.settings, job), lr=rate.peak)
        if self.step.scaler.is_enabled():
            self.step.scaler.load_state_dict(self.step.scaler.state_dict() | {"scale": SCALE})
        self.step.model.train()
        torch.manual_seed(self.settings.seed)
        feed = Feed(
            job.train, job.task, job.comm, job.sizes, seed=self.settings.seed, device=self.device, phases=job.phases
        )
        self._inputs: Iterator[tuple[RankBatch, Any]] = feed.micro_batches(feed.batches(Position()), 0)
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def say(self, *_: str) -> None:
        """Nobody listens."""

    def run_step(self, *, measure: bool = False) -> Pending:
        """The next step, with what comes to it."""
        batch, inputs = next(self._inputs)
        return self.step(
            inputs,
            backward_passes=len(batch.indices),
            global_count=batch.global_count,
            lr=self.lr,
            measure=measure,
        )

    def weights(self) -> torch.Tensor:
        """What is trained and what is evaluated, one after the other, on the host."""
        models = dict.fromkeys((self.step.model, self.step.evaluated))
        values = [value for model in models for value in model.state_dict().values() if value.is_floating_point()]
        return torch.cat([value.detach().cpu().flatten() for value in values])
