"""A training under construction: what features read, and the slots that they fill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.blocks import Cuts
from hvdtrain.core.every_step import EveryStep, Follower
from hvdtrain.core.layout import Layout
from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.step import Witness
from hvdtrain.core.task import Task
from hvdtrain.loop.feed.feed import Split, raw_batches
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.sync import GradientSync


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model to train, with its task, data and ranks."""

    comm: Comm
    device: torch.device
    model: nn.Module  # complete, on the host; on meta in a dry run
    task: Task
    train: Split
    cuts: Cuts
    sizes: BatchSizes
    steps: int  # of the run
    length_option: str = "--epochs"  # the option that sets the length of the run
    precision: str = "fp32"
    phases: Phases = OFF
    is_shared: bool = True  # whether all ranks see the run folder
    resumed: Mapping[str, Any] = field(default_factory=dict)  # `metadata` of the checkpoint from which the run resumes
    test_sets: Mapping[str, range] | None = None  # of the test split, see loop.evaluation
    data: str | None = None  # a hash of some samples of both splits, if they are read alike each time
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None  # of the program
    optimizer_name: str | None = None
    peak_lr: float | None = None  # of that optimizer
    schedule: Callable[[float], float] | None = None  # of the program, see recipe.own

    def example(self) -> tuple[Tensor, ...]:
        """Return the model's arguments for one micro-batch."""
        wanted = torch.arange(min(max(2, self.sizes.micro_batch), len(self.train)))
        [(samples, raw)] = raw_batches(self.train, [wanted], self.device, None)
        return self.task.inputs(self.task.prepare(raw, samples, None))


@dataclass(kw_only=True)
class Draft:
    """A step under construction, with the model on its device and equal on all ranks."""

    job: Job
    where: Layout
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    average: Follower | None
    how: GradientSync
    when: EveryStep = field(default_factory=EveryStep)
    witnesses: list[Witness] = field(default_factory=list)
