"""One rank of bench/estimated.py: steps of efficientnet_b0 on half a core, timed from report to report.

mpirun -np 2 python bench/estimated_rank.py OUT STEPS --sync local --sync-every 16
"""

import ctypes
import json
import os
import sys
import tempfile
import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import hvdtrain
from hvdtrain.vision import models

BATCH = 16
WARMUP_STEPS = 2
GROUPS = "estimated-"  # names of the groups of processes
QUOTA_US, PERIOD_US = 50_000, 100_000  # half a core


def limit() -> None:
    """Half a core for all threads of this process; bench/estimated.py removes the group."""
    root = Path(tempfile.mkdtemp())
    if ctypes.CDLL(None).mount(b"cgroup", str(root).encode(), b"cgroup", 0, b"cpu"):
        sys.exit("the controller cpu of cgroup v1 cannot be mounted")
    group = root / f"{GROUPS}{time.monotonic_ns()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def loss_of_each(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return cross_entropy(model(batch["images"]), batch["labels"], reduction="none")


def main(run: "hvdtrain.Run[hvdtrain.Settings]") -> None:
    samples = (int(STEPS) + WARMUP_STEPS) * BATCH * run.ranks.data.size
    torch.manual_seed(0)
    split = {"images": torch.randn(samples, 3, 32, 32), "labels": torch.arange(samples) % 10}
    few = {name: tensor[: BATCH * run.ranks.data.size] for name, tensor in split.items()}
    training = run.training(lambda: models.build("efficientnet_b0", classes=10), loss_of_each, train=split, test=few)
    limit()
    marks = [(event.step, time.perf_counter()) for event in training if isinstance(event, hvdtrain.Report)]
    if run.ranks.rank == 0:
        Path(OUT).write_text(json.dumps(marks))


if __name__ == "__main__":
    OUT, STEPS, *words = sys.argv[1:]
    sys.argv = [sys.argv[0], *words]
    hvdtrain.start(main, hvdtrain.Settings)
