"""One rank of bench/pipeline.py: steps of a model that is cut into stages, or stages that sleep; started by it.

    mpirun -np 2 python bench/pipeline_rank.py OUT steps --model efficientnet_b7 --stages 2 --micro-batches 8 --batch 2
    mpirun -np 2 python bench/pipeline_rank.py OUT sleep --stages 2 --micro-batches 8 --order gpipe

Rank 0 writes what it and the others have measured to OUT.
"""

import argparse
import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from sequences import MASK, VOCABULARY, sequences
from torch import Tensor

from hvdtrain.core.order import BatchSizes
from hvdtrain.core.step import precision_context
from hvdtrain.core.task import Batch, Model, Sums
from hvdtrain.program.assembly import step_of_run
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.device import share_cores
from hvdtrain.settings.join import horovod_fusion_mb
from hvdtrain.stages.comm import PartsComm, in_parts
from hvdtrain.stages.part import Part, measured_on_all, part_on_all, require_stages
from hvdtrain.stages.pipeline import Pipeline
from hvdtrain.stages.point_to_point import join_replica
from hvdtrain.text import config as texts
from hvdtrain.text import model as berts
from hvdtrain.text.task import MaskedWords
from hvdtrain.tracking import peaks
from hvdtrain.vision import config as images
from hvdtrain.vision import models

CPU = torch.device("cpu")
FORWARD_S, BACKWARD_S = 0.02, 0.04  # of a stage that sleeps


class Images:
    """Random ones of `pixels` x `pixels`, in ten classes."""

    def __init__(self, pixels: int) -> None:
        self._pixels = pixels

    def batch(self, count: int) -> Batch:
        """N of them."""
        size = (count, 3, self._pixels, self._pixels)
        return {"images": torch.randn(size), "labels": torch.arange(count) % 10}

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        """What the model is called with."""
        return (batch["images"],)

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
    arguments.add_argument("--recompute", action="store_true")
    arguments.add_argument("--steps", type=int, default=2, help="after one that is not measured")
    chosen = arguments.parse_args()
    settings = {"accumulate_steps": chosen.micro_batches, "stages": chosen.stages, "recompute": chosen.recompute}
    config: Any = dataclasses.replace(texts.tiny(), task="mlm", **settings)
    if not chosen.model.startswith("bert"):
        config = dataclasses.replace(images.scaled(), ema_epochs=0.0, **settings)
    world = connect(fusion_threshold_mb=horovod_fusion_mb(config), cycle_time_ms=None)
    share_cores(world)
    part, parts = config.parts
    comm = in_parts(world, parts, part)
    comm.start()
    mine = sleep(comm, chosen) if chosen.what == "sleep" else steps(comm, config, chosen)
    answers = comm.allgather(mine)
    if comm.rank == 0:
        chosen.out.write_text(json.dumps({"ranks": answers}))


def steps(comm: Comm, config: Any, chosen: argparse.Namespace) -> dict[str, Any]:
    """The time of each step, and the most memory that this rank has held since before there was a model."""
    started_mib = resident_mib()
    torch.manual_seed(0)
    if chosen.model.startswith("bert"):
        made = sequences(chosen, CPU, 0)
        task: Any = MaskedWords(made.lengths, seed=0, mask_id=MASK, vocabulary=VOCABULARY)
        batch = task.prepare({"tokens": made.tokens, "lengths": made.lengths}, made.samples, 0)
        count = task.counts(made.samples).sum().item()
        model: Any = berts.BertForMaskedLM(berts.sizes_of(chosen.model, vocabulary=VOCABULARY))
        blocks = berts.blocks(model)
    else:
        task, count = Images(chosen.pixels), chosen.batch
        batch = task.batch(chosen.batch)
        model = models.build(chosen.model, classes=10)
        blocks = models.blocks(model)
    part = cut(comm, config, chosen, model=model, blocks=blocks, inputs=task.inputs(batch))
    sizes = BatchSizes(
        micro_batch=chosen.batch,
        global_batch=chosen.batch * chosen.micro_batches * comm.data.size,
        steps_per_epoch=chosen.steps,
    )
    step = step_of_run(comm, config, model, task, CPU, lr=0.01, sizes=sizes, part=part, blocks=blocks)
    step.model.train()
    times_s = []
    for _ in range(1 + chosen.steps):
        comm.allgather(None)
        started_s = time.perf_counter()
        step(
            [batch] * chosen.micro_batches,
            backward_passes=chosen.micro_batches,
            global_count=count * chosen.micro_batches * comm.data.size,
            lr=0.01,
        ).read()
        comm.allgather(None)
        times_s.append(time.perf_counter() - started_s)
    peak_mib = peaks.of_process(CPU)["resident_mib"]
    starts = [] if part is None else part.starts[1:]
    return {
        "peak_mib": peak_mib,
        "above_start_mib": peak_mib - started_mib,
        "step_s": times_s[1:],
        "at": ",".join(map(str, starts)),
    }


def cut(
    comm: Comm, config: Any, chosen: argparse.Namespace, *, model: Any, blocks: Any, inputs: tuple[Tensor, ...]
) -> Part | None:
    """This rank's stage, as in a run; None of one stage."""
    if chosen.stages == 1:
        return None
    assert isinstance(comm, PartsComm)
    join_replica(comm.replica, CPU)
    passages = measured_on_all(
        comm, model, blocks, inputs, device=CPU, context=precision_context(CPU, config.precision)
    )
    pipeline = Pipeline(comm.replica.rank, chosen.stages, CPU, order=chosen.order)
    cuts = require_stages(blocks, chosen.stages, chosen.at)
    return part_on_all(comm, model, blocks, passages, cuts=cuts, pipeline=pipeline, recompute=config.recompute)


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
    assert isinstance(comm, PartsComm)
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
            room=lambda _: torch.empty(1),
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
