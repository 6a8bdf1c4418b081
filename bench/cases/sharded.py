"""An optimizer that the ranks divide, against one that each keeps whole: time of a step, memory of a rank, bytes sent.

Both steps train in one process of each rank, one after the other: other work on the
machine changes within minutes.
"""

import argparse
import itertools
import json
import os
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from bench.cases.steps import givens, ours
from bench.jobs import job, mpirun
from bench.pairs import Case, Table, ratio
from bench.sides import LR, Given, GivenImages, given_words, is_text
from hvdtrain.core.layout import Layout
from hvdtrain.core.step import Slots, Step
from hvdtrain.core.task import Batch
from hvdtrain.loop.draft import Draft
from hvdtrain.loop.feed.feed import Resident
from hvdtrain.parallel.sync.reducers import sum_gradients
from hvdtrain.parallel.sync.sharded import ShardedSync
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage

WAYS = {"whole": "", "divided": "--shard-optimizer"}
SENDING: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, divided": {"is_sharded": True},
    "fp32, divided, --deterministic": {"is_sharded": True, "bucket_mb": 0.0},
    "fp16": {"is_half": True},
    "fp16, divided": {"is_half": True, "is_sharded": True},
}
KINDS = ("parameters", "optimizer", "average", "pss", "pss_at_end")
CPU = torch.device("cpu")


def batches_of(given: Given, comm: Comm) -> tuple[Any, list[Batch]]:
    """Return the task, and this rank's prepared batches."""
    if not is_text(given.model):
        task = GivenImages(given, CPU, comm.rank, Resident(labels=torch.zeros(1)))
        turns = given.tensors(CPU, comm.rank, torch.channels_last)
        return task, [{"images": images, "labels": labels} for images, labels in turns]
    words, train, _ = given_words(given, 4 * given.batch, given.batch)
    wanted = torch.arange(4 * given.batch).split(given.batch)
    return words, [
        words.prepare(raw, samples, 0) for samples, raw in zip(wanted, train.batches(wanted, CPU, None), strict=True)
    ]


def step_of(given: Given, comm: Comm, task: Any, optimizer: str, *, is_half: bool = False, **options: Any) -> Step:
    """Return a step with a moving average; see `sum_gradients` for the options."""
    layout = torch.contiguous_format if is_text(given.model) else torch.channels_last
    model: nn.Module = given.network().to(memory_format=layout)
    made = optim.BUILD[optimizer](optim.parameter_groups(model, 5e-4, decay_all=False), LR)
    average, scaler = MovingAverage(model, horizon_steps=100), GradScaler("cpu", enabled=False)
    how = sum_gradients(comm.data, model, Wire(comm.size, is_half=is_half), **options)
    draft: Any = {"job": None, "where": Layout(), "optimizer": made, "scaler": scaler, "average": average, "how": how}
    if isinstance(how, ShardedSync):
        how.divide(Draft(**draft))
    return Step(model=model, task=task, optimizer=made, slots=Slots(comm=comm, how=how), scaler=scaler, average=average)


def turns(out: Path, *, optimizer: str, rounds: int, **shared: Any) -> None:
    """Take turns of a few steps each way; rank 0 writes the median step of each turn, s, by way."""
    given = Given(**shared)
    comm = connect(fusion_threshold_mb=0.0, cycle_time_ms=None)
    comm.start()
    task, batches = batches_of(given, comm)
    steps = {way: step_of(given, comm, task, optimizer, is_sharded=bool(words)) for way, words in WAYS.items()}
    step_s: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(rounds + 1):
        for way in list(WAYS) if number % 2 else reversed(list(WAYS)):
            taken = []
            for batch in itertools.islice(itertools.cycle(batches), given.steps):
                began = time.perf_counter()
                count = float(given.batch * comm.size)
                steps[way](iter([batch]), backward_passes=1, global_count=count, lr=LR).read()
                taken.append(time.perf_counter() - began)
            if number:  # the first warms up
                step_s[way].append(statistics.median(taken))
    if comm.rank == 0:
        out.write_text(json.dumps(step_s))


def speed(chosen: argparse.Namespace) -> Table:
    """Steps/s with the optimizer divided, over those without, by turns of --steps."""
    table = Table(
        name="sharded",
        question="Speed of a step with --shard-optimizer, times that without:",
        columns=["model", "batch", "np", "optimizer", "times as fast", "ms"],
    )
    for ranks in chosen.np:
        for given in givens(chosen):
            of_way = job(
                mpirun(ranks),
                "cases.sharded:turns",
                optimizer=chosen.optimizer,
                rounds=chosen.rounds,
                **given,
            )
            times, step_ms = ratio(of_way["whole"], of_way["divided"]), 1000 * statistics.median(of_way["divided"])
            table.add(given["model"], given["batch"], ranks, chosen.optimizer, times, round(step_ms, 1))
    return table


def memory(chosen: argparse.Namespace) -> Table:
    """The memory of a rank for parameters, optimizer and average, and its whole memory (PSS), MiB.

    pss is that after the last step, pss at end that after the evaluation and the last checkpoint, which rank 0 writes.
    """
    table = Table(
        name="sharded-memory",
        question="The most that a rank keeps, MiB, by whether the ranks divide the optimizer:",
        columns=["model", "np", "way", *KINDS],
        conditions={"optimizer": chosen.optimizer},
    )
    for ranks in chosen.np:
        for given in givens(chosen, warmup=1):
            words = f"--optimizer {chosen.optimizer} --ema-epochs 2"
            for way, run in ours(ranks, given, {way: f"{words} {more}" for way, more in WAYS.items()}).items():
                held = run()["memory"]
                most = [round(max(one[f"{kind}_mib"] for one in held)) for kind in KINDS]
                table.add(given["model"], ranks, way, *most)
    return table


def sent_bytes() -> int:
    """Return what this process's TCP connections have sent and others have received, as the kernel counts it."""
    total = 0
    for connection in psutil.Process().net_connections("tcp"):
        if connection.status == psutil.CONN_ESTABLISHED:
            with socket.socket(fileno=os.dup(connection.fd)) as twin:
                info = twin.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 128)
            total += int.from_bytes(info[120:128], sys.byteorder)  # tcpi_bytes_acked
    return total


def sends(out: Path, **shared: Any) -> None:
    """Take a few steps each way; rank 0 writes the MB that each rank sent in a step, by way."""
    given = Given(**shared)
    comm = connect(fusion_threshold_mb=0.0, cycle_time_ms=None)
    comm.start()
    task, batches = batches_of(given, comm)
    sent_mb = {}
    for way, options in SENDING.items():
        step, began = step_of(given, comm, task, "adamw", **options), 0
        for number, batch in zip(range(given.warmup + given.steps), itertools.cycle(batches), strict=False):
            if number == given.warmup:
                began = sent_bytes()
            step(iter([batch]), backward_passes=1, global_count=float(given.batch * comm.size), lr=LR).read()
        sent_mb[way] = comm.allgather((sent_bytes() - began) / given.steps / 1e6)
    if comm.rank == 0:
        out.write_text(json.dumps(sent_mb))


def sent(chosen: argparse.Namespace) -> Table:
    """The bytes that each rank sends in a step, over TCP instead of shared memory.

    It is compared with what a ring's all-reduce sends, 2 (N - 1) / N of the gradients in fp32.
    """
    table = Table(
        name="sharded-sent",
        question="MB that each rank sends in a step, and times a ring's all-reduce in fp32:",
        columns=["model", "np", "way", "MB, least", "MB, most", "times an all-reduce"],
    )
    for ranks, given in itertools.product(chosen.np, givens(chosen, warmup=2)):
        launch = mpirun(ranks, "--mca", "pml", "ob1", "--mca", "btl", "tcp,self", "--mca", "btl_tcp_if_include", "lo")
        ring_mb = 2 * (ranks - 1) / ranks * sum(one.nbytes for one in Given(**given).network().parameters()) / 1e6
        for way, by_rank in job(launch, "cases.sharded:sends", **given).items():
            least, most = round(min(by_rank), 2), round(max(by_rank), 2)
            table.add(given["model"], ranks, way, least, most, round(max(by_rank) / ring_mb, 3))
    return table


OF_BOTH = {"pixels": 32, "optimizer": "adamw"}
OF_SPEED = {"models": ["efficientnet_b0:16", "bert_tiny:32"], "rounds": 15, "steps": 10, "np": [2]}
CASES = {
    "sharded": Case(measure=speed, options=OF_BOTH | OF_SPEED),
    "sharded-sent": Case(measure=sent, options={"models": ["bert_mini:2"], "pixels": 32, "steps": 4, "np": [2, 4]}),
    "sharded-memory": Case(measure=memory, options=OF_BOTH | {"models": ["bert_base:1"], "steps": 3, "np": [1, 2, 4]}),
}
