"""Horovod's traps: what the naive code does, and what ours does. argv: folder, traps."""

import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.core.step import Step
from hvdtrain.loop.evaluation import evaluate
from hvdtrain.model.batch_norm import layers
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.ranks.wire import Wire
from hvdtrain.safety import exits
from hvdtrain.sync.reducers import sum_gradients
from hvdtrain.vision import images as data
from hvdtrain.vision import models
from tests.steps import step_of as step_over
from tests.steps import take

comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
comm.start()
RANK = comm.rank


class Linear(nn.Module):
    """Logits x @ w for images (N, 3, 2, 2), so that gradients are easy to predict."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight = nn.Parameter(torch.randn(12, 4) / 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.flatten(1) @ self.weight


def batch(count: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    return torch.rand(count, 3, 2, 2, generator=random), torch.randint(0, 4, (count,), generator=random)


def step_of(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Step:
    return step_over(model, optimizer=optimizer, comm=comm, sync=sync_of(model), **options)


def one_step(step: Step, *, lr: float = 0.1, seed: int = 0) -> None:
    take(step, batch(seed=seed), global_count=4 * comm.size, lr=lr)


def sync_of(model: nn.Module, *, is_half: bool = False, groups: int | None = None) -> GradientSync:
    sync = sum_gradients(comm, model, Wire(comm.size, is_half=is_half), reducer="horovod", groups=groups)
    sync._shares_cores = False  # Horovod's hooks send, as on GPUs
    return sync


def error_of(act: Callable[[], Any]) -> str | None:
    try:
        act()
    except Exception as error:  # noqa: BLE001 (whatever Horovod raises is the trap)
        return f"{type(error).__name__}: {error}"
    return None


def naive(model: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> Any:
    return hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters(), **options)


def zero_grad_to_none() -> dict[str, Any]:
    model = Linear()
    wrapped = naive(model, torch.optim.SGD(model.parameters(), lr=0.1))
    ours = Linear()
    step = step_of(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    one_step(step)
    return {
        "naive": error_of(lambda: wrapped.zero_grad(set_to_none=True)),
        "ours": error_of(lambda: step.optimizer.zero_grad(set_to_none=True)),
        "cleared": all(one.grad is None for one in ours.parameters()),
    }


def inf_on_one_rank_under_amp() -> dict[str, Any]:
    """scaler.step(opt) on the wrapper looks at the gradients before they are summed."""
    model = Linear()
    scaler = GradScaler("cpu", enabled=True, init_scale=1024.0)
    wrapped = naive(model, torch.optim.SGD(model.parameters(), lr=0.1))
    if RANK == 1:
        time.sleep(1.0)  # so that rank 0 looks before the sum, which would put it right, is there
    scaler.scale(model(batch()[0]).sum() * (torch.inf if RANK == 1 else 1.0)).backward()
    naive_error = error_of(lambda: (scaler.step(wrapped), scaler.update()))
    if RANK == 1:
        wrapped.synchronize()  # the rank that skipped has left its sum under way, under the name that ours takes
    ours = Linear()
    ours_scaler = GradScaler("cpu", enabled=True, init_scale=1024.0)
    step = step_of(ours, torch.optim.SGD(ours.parameters(), lr=0.1), scaler=ours_scaler)
    images, labels = batch()
    done = take(step, (images * (torch.inf if RANK == 1 else 1.0), labels), global_count=8, lr=0.1)
    return {
        "naive": [naive_error, scaler.get_scale()],
        "ours": [ours_scaler.get_scale(), done.skipped is not None and done.skipped.rank],
        "finite": bool(torch.isfinite(ours.weight).all()),
    }


def fp16_overflow() -> dict[str, Any]:
    found = {}
    for name, options in {"plain": {}, "groups": {"groups": 1, "gradient_predivide_factor": 2.0}}.items():
        model = Linear()
        wrapped = naive(model, torch.optim.SGD(model.parameters(), lr=0.1), compression=hvd.Compression.fp16, **options)
        (model.weight * 40000.0).sum().backward()
        wrapped.synchronize()
        found[f"naive_{name}"] = model.weight.grad.max().item()
    for name, groups in {"plain": None, "groups": 1}.items():
        model = Linear()
        sync = sync_of(model, is_half=True, groups=groups)
        sync.end_step(overflowed=True)  # the step before, skipped by all
        sync.expect(1)
        (model.weight * 40000.0 / comm.size).sum().backward()
        sync.finish()
        found[f"ours_{name}"] = model.weight.grad.max().item()
    return found


def joined_ranks() -> dict[str, Any]:
    """hvd.join: rank 1 has no data left, and rank 0's gradient is halved. Ours: an empty shard."""
    gradient = hvd.allreduce(torch.ones(1), name="with.join", op=hvd.Average).item() if RANK == 0 else None
    hvd.join()
    ours = Linear()
    start = copy.deepcopy(ours)
    step = step_of(ours, torch.optim.SGD(ours.parameters(), lr=0.1))
    images, labels = batch(2)
    mine = slice(0, 2) if RANK == 0 else slice(0, 0)
    take(step, (images[mine], labels[mine]), global_count=2, lr=0.1)
    nn.functional.cross_entropy(start(images), labels).backward()
    expected = start.weight - 0.1 * start.weight.grad
    return {"naive": gradient, "ours": (ours.weight - expected).abs().max().item()}


def batch_norm_statistics() -> dict[str, Any]:
    """Every rank evaluates with its own, unless they are averaged."""
    model = models.build("efficientnet_tiny", classes=10)
    comm.broadcast_(model.state_dict().values())
    model.train()
    model(torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(RANK)))
    layer = layers(model)[0]
    own = layer.running_mean.tolist()
    metrics = evaluate(step_over(model, comm=comm), data.digits().test, 0, micro_batch=64)
    return {"naive": own, "ours": layer.running_mean.tolist(), "loss": metrics["loss"]}


def main() -> None:
    answers = {name: globals()[name]() for name in sys.argv[2:]}
    (Path(sys.argv[1]) / f"rank-{RANK}.json").write_text(json.dumps(answers))


exits.run(main)
