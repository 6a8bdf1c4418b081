"""Sizes of buckets, and of the first one: the step's time in turns within one job, here or over a slow link.

    python bench/buckets.py --rounds 15 --model efficientnet_b0 --batch 16
    python bench/buckets.py --rounds 6 --model efficientnet_b0 --batch 16 --rate 1gbit      two hosts, as root

2 ranks, one thread each. Every variant has a model of its own, and each round takes one step with each. Below 1 is
faster than buckets of 25 MiB.
"""

import argparse
import json
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch

import torch
import torch.nn.functional as F
import two_hosts
from pairs import HERE, Table, job, mpirun, ratio
from workload import network, optimizer_of, tensors

from hvdtrain.ranks import buckets
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.wire import Wire

SIZES_MB = (1.0, 4.0, 8.0, 25.0, 64.0, 128.0)
VARIANTS = {
    f"{size:.0f} MiB{', the first 1' if first else ''}": (size, first)
    for size, first in product(SIZES_MB, (False, True))
    if size > 1 or not first
}
USUAL = "25 MiB"
WARMUP_ROUNDS = 2  # the first step sends at its end


def main() -> None:
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("out", nargs="?", type=Path, help="of a rank, which the bench starts")
    words.add_argument("--rounds", type=int, default=15)
    words.add_argument("--model", default="efficientnet_b0")
    words.add_argument("--batch", type=int, default=16)
    words.add_argument("--rate", help="of the link between two hosts with a rank each, such as 1gbit")
    words.add_argument("--only", nargs="+", default=list(VARIANTS), help="variants, with the usual one among them")
    chosen = words.parse_args()
    if chosen.out is not None:
        rank(chosen)
        return
    step_s = started(chosen)
    table = Table(
        name=f"buckets-{chosen.model}-{chosen.rate or 'one host'}",
        question=f"Time of a step by the size of buckets, against {USUAL} for all of them:",
        columns=["variant", "ms", "ratio"],
        about={"model": chosen.model, "batch": chosen.batch, "link": chosen.rate or "one host"},
    )
    for name, seconds in step_s.items():
        median_ms = 1000 * sorted(seconds)[len(seconds) // 2]
        table.add(variant=name, ms=round(median_ms, 1), ratio=ratio(seconds, step_s[USUAL]))
    table.write()


def started(chosen: argparse.Namespace) -> dict[str, list[float]]:
    """By variant, the seconds of each step."""
    words = [f"--rounds={chosen.rounds}", f"--model={chosen.model}", f"--batch={chosen.batch}", "--only", *chosen.only]
    if chosen.rate is None:
        return dict(job(mpirun(2), [str(HERE / "buckets.py"), *words]))
    with TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        two_hosts.run(chosen.rate, 1, [str(HERE / "buckets.py"), str(out), *words])
        return dict(json.loads(out.read_text()))


def rank(chosen: argparse.Namespace) -> None:
    """All variants on this rank, in turns."""
    torch.set_num_threads(1)
    comm = connect(fusion_threshold_mb=0.0, cycle_time_ms=None)
    comm.start()
    batches = tensors(chosen.batch, torch.device("cpu"), comm.rank)

    def make(name: str) -> Callable[[int], None]:
        size, has_first = VARIANTS[name]
        model = network(chosen.model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        model.train()
        optimizer = optimizer_of(model)
        sync = buckets.BucketSync(
            model,
            wire=Wire("none", comm.size),
            bucket_mb=size,
            broadcast_names=lambda names: list(json.loads(comm.broadcast(json.dumps(names).encode()))),
            begin_sum=lambda values, bucket: comm.data.begin_sum(values, f"{name}.{bucket}"),
        )

        def step(number: int) -> None:
            images, labels = batches[number % len(batches)]
            optimizer.zero_grad(set_to_none=True)
            sync.expect(1)
            F.cross_entropy(model(images), labels).backward()
            with patch.object(buckets, "FIRST_BUCKET_MB", 1.0 if has_first else size):
                sync.finish()
            optimizer.step()

        return step

    steps = {name: make(name) for name in chosen.only}
    step_s: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(WARMUP_ROUNDS + chosen.rounds):
        for name in list(steps) if number % 2 else reversed(list(steps)):
            comm.allgather(None)
            started_s = time.perf_counter()
            steps[name](number)
            comm.allgather(None)
            if number >= WARMUP_ROUNDS:
                step_s[name].append(time.perf_counter() - started_s)
    if comm.rank == 0:
        chosen.out.write_text(json.dumps(step_s))


if __name__ == "__main__":
    main()
