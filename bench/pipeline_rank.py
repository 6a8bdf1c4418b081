"""One rank of bench/pipeline.py: steps of a model that is cut into stages, or stages that sleep; started by it.

    mpirun -np 2 python bench/pipeline_rank.py OUT steps --model efficientnet_b7 --stages 2 --micro-batches 8 --batch 2
    mpirun -np 2 python bench/pipeline_rank.py OUT sleep --stages 2 --micro-batches 8 --order gpipe

Rank 0 writes what it and the others have measured to OUT.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jobs import job_of, ranks_of, step_of
from sequences import MASK, VOCABULARY, sequences
from timed_steps import setting
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.core.blocks import Blocks
from hvdtrain.core.phases import Phase, Unmeasured
from hvdtrain.core.task import Batch, Model, Sums, Task
from hvdtrain.feed.feed import Resident
from hvdtrain.program.job import make_on_all
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.replica.parts import split_replicas
from hvdtrain.replica.point_to_point import join_replica
from hvdtrain.stages.pipeline import Pipeline
from hvdtrain.sync.comm import group_ranks
from hvdtrain.text import model as berts
from hvdtrain.text import settings as texts
from hvdtrain.text.task import MaskedWords
from hvdtrain.tracking import peaks
from hvdtrain.vision import models
from hvdtrain.vision import settings as images

CPU = torch.device("cpu")
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of a stage that sleeps


class Images(Task):
    """Random ones of `pixels` x `pixels`, in ten classes."""

    def __init__(self, pixels: int) -> None:
        self._pixels = pixels

    def batch(self, count: int) -> Batch:
        """N of them."""
        size = (count, 3, self._pixels, self._pixels)
        return {"images": torch.randn(size), "labels": torch.arange(count) % 10}

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        """As in a run, without label smoothing."""
        logits = model(batch["images"]).float()
        loss = F.cross_entropy(logits, batch["labels"], reduction="sum")
        return Sums(loss=loss, count=torch.full_like(loss, len(logits)), more={})


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("what", choices=("steps", "sleep"))
    arguments.add_argument("--model", default="bert_base")
    arguments.add_argument("--stages", type=int, default=1)
    arguments.add_argument("--micro-batches", type=int, default=8)
    arguments.add_argument("--batch", type=int, default=2, help="samples of a micro-batch")
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--pixels", type=int, default=64)
    arguments.add_argument("--order", choices=("1f1b", "gpipe"), default="1f1b")
    arguments.add_argument("--at", help="as --stages-at; by time if not given")
    arguments.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting")
    arguments.add_argument("--steps", type=int, default=2, help="after one that is not measured")
    arguments.add_argument("--count", action="store_true", help="the operations of one more step")
    chosen = arguments.parse_args()
    settings = {
        "batch_size_per_rank": chosen.batch,
        "global_batch_size": None,
        "accumulate_steps": chosen.micro_batches,
        "stages": chosen.stages,
        "stages_at": chosen.at,
        "pipeline_schedule": chosen.order,
        **dict(setting(word) for word in chosen.set),
    }
    config: Any = dataclasses.replace(texts.tiny(), task="mlm", **settings)
    if not chosen.model.startswith("bert"):
        config = dataclasses.replace(images.scaled(), ema_epochs=0.0, **settings)
    part, parts = config.parts
    comm = split_replicas(ranks_of(config), parts, part)
    if config.sync != "flat":
        comm = group_ranks(comm, config.sync_group_size)
    comm.start()
    mine = sleep(comm, chosen) if chosen.what == "sleep" else steps(comm, config, chosen)
    answers = comm.allgather(mine)
    if comm.rank == 0:
        chosen.out.write_text(json.dumps({"ranks": answers}))


def steps(comm: Comm, config: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """The time of each step, and the most memory that this rank has held since before there was a model."""
    started_mib = resident_mib()
    make: Callable[[], nn.Module]
    if chosen.model.startswith("bert"):
        made = sequences(chosen, CPU, 0)
        task: Any = MaskedWords(made.lengths, seed=0, mask_id=MASK, vocabulary=VOCABULARY)
        train = Resident(tokens=made.tokens, lengths=made.lengths)
        batch = task.prepare(train.tensors, made.samples, 0)
        count = task.counts(made.samples).sum().item()
        make = partial(berts.BertForMaskedLM, berts.sizes_of(chosen.model, vocabulary=VOCABULARY))
        blocks_of: Callable[[Any], Blocks] = berts.blocks
    else:
        task, count = Images(chosen.pixels), chosen.batch
        batch = task.batch(chosen.batch)
        train = Resident(**batch)
        make, blocks_of = partial(models.build, chosen.model, classes=10), models.blocks
    clock, (model, give_values) = Busy(), make_on_all(comm, config, make)
    of_model: dict[str, Any] = {"model": model, "blocks": blocks_of(model), "give_values": give_values}
    job = job_of(comm, config, CPU, task=task, train=train, phases=clock, **of_model)
    step = step_of(config, job, lr=0.01)
    built_mib = peaks.process_peaks(CPU)["resident_mib"]
    step.model.train()

    def take_step() -> None:
        step(
            [batch] * chosen.micro_batches,
            backward_passes=chosen.micro_batches,
            global_count=count * chosen.micro_batches * comm.data.size,
            lr=0.01,
        ).read()

    times_s, busy_s = [], []
    for _ in range(1 + chosen.steps):
        comm.allgather(None)
        started_s, clock.busy_s = time.perf_counter(), 0.0
        take_step()
        busy_s.append(clock.busy_s)
        comm.allgather(None)
        times_s.append(time.perf_counter() - started_s)
    with Operations() as counter:  # type: ignore[no-untyped-call]
        if chosen.count:
            take_step()
    peak_mib = peaks.process_peaks(CPU)["resident_mib"]
    return {
        "peak_mib": peak_mib,
        "above_start_mib": peak_mib - started_mib,
        "built_mib": built_mib - started_mib,
        "step_s": times_s[1:],
        "busy_s": statistics.median(busy_s[1:]),
        "operations": counter.count,
        "at": ",".join(map(str, step.slots.where.about.get("stages_at", []))),
    }


class Busy(Unmeasured):
    """How long a rank computes micro-batches."""

    busy_s = 0.0
    _phase: Phase = "other"
    _since_s = 0.0

    def enter(self, phase: Phase) -> None:
        """The time since the phase before counts if that was one."""
        now_s = time.perf_counter()
        if self._phase in ("forward", "loss", "backward"):
            self.busy_s += now_s - self._since_s
        self._phase, self._since_s = phase, now_s

    def end_step(self) -> None:
        """Steps are told apart by whoever reads."""

    def means(self) -> None:
        """There are none."""

    def close(self) -> None:
        """There is nothing to close."""


class Operations(TorchDispatchMode):
    """How many of them torch dispatches."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Sleeping(torch.autograd.Function):
    """A layer that takes its time, and notes it."""

    slept_s = 0.0

    @staticmethod
    def forward(_: Any, received: Tensor) -> Tensor:
        Sleeping.sleep(FORWARD_S)
        return received.view_as(received)

    @staticmethod
    def backward(_: Any, *gradients: Tensor) -> Tensor:
        Sleeping.sleep(BACKWARD_S)
        return gradients[0]

    @classmethod
    def sleep(cls, seconds: float) -> None:
        """At least so long; what it was is added up."""
        started_s = time.perf_counter()
        time.sleep(seconds)
        cls.slept_s += time.perf_counter() - started_s


def slow(received: Tensor) -> Tensor:
    """The same, later."""
    passed: Tensor = Sleeping.apply(received)  # type: ignore[no-untyped-call]
    return passed


def sleep(comm: Comm, chosen: argparse.Namespace) -> dict[str, Any]:
    """The share of each step in which this stage had nothing to do."""
    assert isinstance(comm.replica, MpiMembers)
    join_replica(comm.replica, CPU)
    pipeline = Pipeline(comm.replica.rank, chosen.stages, CPU, order=chosen.order)
    idle = []
    for _ in range(1 + chosen.steps):
        comm.allgather(None)
        Sleeping.slept_s, started_s = 0.0, time.perf_counter()
        pipeline.train(
            chosen.micro_batches,
            forward=lambda _, received: slow(torch.ones(1, requires_grad=True) if received is None else received),
            loss=lambda _, outputs: outputs.sum(),
            make_buffer=lambda _: torch.empty(1),
        )
        comm.allgather(None)
        idle.append(1 - Sleeping.slept_s / (time.perf_counter() - started_s))
    return {"idle": idle[1:]}


def resident_mib() -> float:
    """Now, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS:")) / 1024


if __name__ == "__main__":
    main()
