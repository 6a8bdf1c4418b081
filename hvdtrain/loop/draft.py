"""A training that is being put together: what features read, and the slots that they fill."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.blocks import Cuts
from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.slots import EveryStep, Follower, Layout, Witness
from hvdtrain.core.task import Task
from hvdtrain.feed.feed import Split, arriving
from hvdtrain.feed.order import BatchSizes
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.sync import GradientSync


@dataclass(frozen=True, kw_only=True)
class Job:
    """What is to be trained, on which ranks."""

    comm: Comm
    device: torch.device
    model: nn.Module  # whole, on the host; with `give_values` on meta
    task: Task
    train: Split
    cuts: Cuts
    sizes: BatchSizes
    steps: int  # of the run
    length_option: str = "--epochs"  # that says how many these are
    precision: str = "fp32"
    phases: Phases = OFF
    is_shared: bool = True  # whether all ranks see the run folder
    resumed: Mapping[str, Any] = field(default_factory=dict)  # what the checkpoint says that the run continues from
    # Makes what is left of the model the whole, with values for what was left; all ranks call it.
    give_values: Callable[[nn.Module], None] | None = None

    def example(self) -> tuple[Tensor, ...]:
        """What the model is called with for one micro-batch."""
        wanted = torch.arange(min(max(2, self.sizes.micro_batch), len(self.train)))
        [(samples, raw)] = arriving(self.train, [wanted], self.device, None)
        return self.task.inputs(self.task.prepare(raw, samples, None))


@dataclass(kw_only=True)
class Draft:
    """A step that is being put together, with the model on its device and equal on all ranks."""

    job: Job
    where: Layout
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    average: Follower | None
    make_sync: Callable[[], GradientSync]  # as gradients travel if no feature fills `how`
    how: GradientSync | None = None
    when: EveryStep = field(default_factory=EveryStep)
    witnesses: list[Witness] = field(default_factory=list)
