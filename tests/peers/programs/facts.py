"""The data of all programs here, and what each does besides training: report, fail, or wait for signals."""

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

RANK = os.environ["RANK"]
NAMES = ("TORCHELASTIC_", "GROUP_", "ROLE_", "RANK", "LOCAL_", "WORLD_SIZE", "MASTER_", "OMP_", "TORCH")
STEPS, BATCH = 4, 4

torch.manual_seed(0)
inputs = torch.randn(2 * STEPS * BATCH, 4)
data = TensorDataset(inputs, inputs.sum(dim=1, keepdim=True))


def model() -> nn.Module:
    """The same on each rank."""
    torch.manual_seed(1)
    return nn.Linear(4, 1)


def after_step(step: int) -> None:
    """Do what PEERS_CASE says: rank 1 fails, or all wait for SIGTERM and note their signals."""
    case = os.environ.get("PEERS_CASE")
    if step == 2 and case == "fail" and RANK == "1":
        os._exit(7)
    if step == 2 and case == "wait":
        notes = Path(f"signals-{RANK}")
        noted = []
        for number in (signal.SIGUSR1, signal.SIGTERM):
            signal.signal(number, lambda number, _: noted.append(signal.Signals(number).name))
        Path(f"pid-{RANK}").write_text(str(os.getpid()))
        while "SIGTERM" not in noted:
            notes.write_text(" ".join(noted))
            time.sleep(0.05)
        notes.write_text(" ".join(noted))
        os._exit(0)


def train(model: Any, optimizer: Any, loader: Any, backward: Callable[[torch.Tensor], object]) -> list[float]:
    """The loop that the libraries without one of their own show; the losses."""
    losses = []
    for step, (inputs, targets) in enumerate(loader, 1):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        backward(loss)
        optimizer.step()
        losses.append(loss.item())
        after_step(step)
    return losses


def report(losses: list[float], *, rank: int, world_size: int) -> None:
    """Write what this rank has seen; rank and world size are those that the peer believes."""
    print(f"output of {RANK}", flush=True)
    print(f"errors of {RANK}", file=sys.stderr, flush=True)
    facts = {"losses": losses, "rank": rank, "world_size": world_size, "python": sys.executable}
    facts["environment"] = {name: value for name, value in os.environ.items() if name.startswith(NAMES)}
    Path(f"rank-{RANK}.json").write_text(json.dumps(facts))
