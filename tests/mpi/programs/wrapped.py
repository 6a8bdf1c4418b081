"""Each optimizer inside Horovod's DistributedOptimizer and outside, with a first step that is skipped. argv: folder."""

import copy
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.distributed_optimizer import HorovodSync
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim
from tests.steps import step_of, take

comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
comm.start()
LR = {"sgd": 0.1, "rmsprop": 0.01, "adam": 1e-3, "adamw": 1e-3, "lars": 0.25, "lamb": 3.5e-3}
SIZES = [[3, 2], [4]][: comm.size]  # of the micro-batches of each rank


class Net(nn.Module):
    """A kernel with memory of its own kind, and a parameter that the last of several ranks does not use."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.head = nn.Conv2d(3, 8, 3, stride=2), nn.Linear(8, 10)
        self.scale = nn.Parameter(torch.ones(10))
        self.to(memory_format=torch.channels_last)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        scores = self.head(self.conv(images).relu().mean((2, 3)))
        return scores * self.scale if comm.rank == 0 else scores


def trained(
    name: str, precision: str, reducer: str, groups: int | None = None
) -> tuple[nn.Module, torch.optim.Optimizer, GradScaler, int]:
    """The model after six steps, of which the first is skipped, and how often the step's own hooks were called."""
    model = Net()
    optimizer = optim.BUILD[name](optim.parameter_groups(model, 0.01, decay_all=False), LR[name])
    waiting = {"wait_context": comm.wait_context, "shares_cores": precision == "fp32"}  # both ways
    sync = (
        HorovodSync(model, wire=Wire("none", comm.size), groups=groups, **waiting)
        if reducer == "horovod"
        else comm.gradient_sync(model, compression="none")
    )
    scaler = GradScaler("cpu", enabled=precision == "fp16", init_scale=1024.0)
    options = {"scaler": scaler, "precision": precision, "clip_norm": 1.0, "witnesses": []}
    step = step_of(model, optimizer=optimizer, sync=sync, comm=comm, **options)
    calls = []
    step.optimizer.register_step_pre_hook(lambda *_: calls.append(1))
    for number in range(6):
        random = torch.Generator().manual_seed(2 * number + comm.rank)
        count = sum(SIZES[comm.rank])
        images = torch.rand(count, 3, 12, 12, generator=random).contiguous(memory_format=torch.channels_last)
        labels = torch.randint(0, 10, (count,), generator=random)
        if number == 0:
            images[-1] = torch.inf
        if number == 3:
            step.optimizer.load_state_dict(copy.deepcopy(step.optimizer.state_dict()))
        parts = zip(images.split(SIZES[comm.rank]), labels.split(SIZES[comm.rank]), strict=True)
        done = take(step, *parts, global_count=sum(map(sum, SIZES)), lr=LR[name])
        assert (done.skipped is not None) == (number == 0), (name, number, done.skipped)
    return model, step.optimizer, scaler, len(calls)


def difference(one: Any, other: Any) -> float:
    """The largest one of any element; infinite where they are not alike."""
    if isinstance(one, torch.Tensor):
        return (one.double() - other.double()).abs().max().item()
    if isinstance(one, dict):
        assert one.keys() == other.keys()
        return max((difference(one[name], other[name]) for name in one), default=0.0)
    if isinstance(one, list | tuple):
        return max((difference(*pair) for pair in zip(one, other, strict=True)), default=0.0)
    return 0.0 if one == other else torch.inf


answer = {}
for name in optim.BUILD:
    for precision in ("fp32", "fp16"):
        (plain, without, scale, _), (model, wrapped, its_scale, calls) = (
            trained(name, precision, reducer) for reducer in ("bucket", "horovod")
        )
        flags = ("defaults", "_step_supports_amp_scaling")
        answer[f"{name} {precision}"] = {
            "weights": difference(dict(plain.named_parameters()), dict(model.named_parameters())),
            "state": difference(without.state_dict(), wrapped.state_dict()),
            "scale": [scale.get_scale(), its_scale.get_scale()],
            "alike": isinstance(wrapped, type(without))
            and type(wrapped).__name__ == type(without).__name__
            and all(getattr(without, flag, None) == getattr(wrapped, flag, None) for flag in flags),
            "horovods": hasattr(wrapped, "synchronize"),
            "calls": calls,
        }
for groups in (1, 2):
    plain, model = (trained("sgd", "fp32", reducer, groups)[0] for reducer in ("bucket", "horovod"))
    answer[f"groups {groups}"] = difference(dict(plain.named_parameters()), dict(model.named_parameters()))
(Path(sys.argv[1]) / f"rank-{comm.rank}.json").write_text(json.dumps(answer))
