"""One rank of a round of bench/slow_link.py: the same steps with each prototype, one after the other.

    mpirun -np 2 python bench/slow_link_steps.py OUT --model efficientnet_b0 --batch 16 --backwards

OUT gets for each prototype the seconds per batch, those without any sync right after it, and the bytes per batch that a
host has sent.
"""

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from sync import FLAT
from sync.delayed import Delayed
from sync.flat import Flat, Half
from sync.groups import Alone, Groups, Sync, groups_of
from sync.local import Local
from sync.local_overlapped import LocalOverlapped
from sync.ours import Ours
from sync.power_sgd import PowerSGD
from sync.top_k import TopK
from sync.two_level import TwoLevel
from torch.optim import Optimizer
from two_hosts import ADDRESSES, sent_bytes
from workload import network, optimizer_of, tensors

from hvdtrain.safety.memory import keep_freed_memory

LEAST_STEPS = 4
WARMUP_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to keep ranks together."""

    make: Callable[[Groups, Optimizer], Sync]
    accumulate: int = 1  # batches of a step
    cycle: int = 1  # batches until everything comes again
    overlaps: bool = False  # what is under way after a cycle belongs to it: one cycle must go before


VARIANTS: dict[str, Variant] = {
    FLAT: Variant(make=Flat),
    "hvdtrain today": Variant(make=Ours),
    "two-level": Variant(make=TwoLevel),
    "fp16": Variant(make=Half),
    "delayed": Variant(make=Delayed),
    "accumulation 4": Variant(make=Flat, accumulate=4, cycle=4),
    "top-k 1 %": Variant(make=partial(TopK, share=0.01)),
    "PowerSGD 1": Variant(make=partial(PowerSGD, rank=1)),
    "PowerSGD 2": Variant(make=partial(PowerSGD, rank=2)),
    "PowerSGD 4": Variant(make=partial(PowerSGD, rank=4)),
    "local 4": Variant(make=partial(Local, every=4), cycle=4),
    "local 16": Variant(make=partial(Local, every=16), cycle=16),
    "local 16, parameters alone": Variant(make=partial(Local, every=16, momenta=False), cycle=16),
    "local 16, overlapped": Variant(make=partial(LocalOverlapped, every=16), cycle=16, overlaps=True),
}
ALONE = Variant(make=Alone)


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("out", type=Path)
    words.add_argument("--model", required=True)
    words.add_argument("--batch", type=int, required=True)
    words.add_argument("--backwards", action="store_true")
    chosen = words.parse_args()
    keep_freed_memory()
    groups = groups_of(len(ADDRESSES))
    names = list(reversed(VARIANTS)) if chosen.backwards else list(VARIANTS)
    measure(ALONE, groups, chosen.model, chosen.batch)  # a process's first steps take longer
    measured: dict[str, dict[str, float]] = {}
    for name in names:
        measured[name] = measure(VARIANTS[name], groups, chosen.model, chosen.batch)
        alone = measure(ALONE, groups, chosen.model, chosen.batch)
        measured[name]["alone_s"] = alone["batch_s"]
    if groups.world.rank == 0:
        chosen.out.write_text(json.dumps(measured))


def measure(variant: Variant, groups: Groups, model: str, batch: int) -> dict[str, float]:
    """The mean of whole cycles."""
    net = network(model).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    net.train()
    optimizer = optimizer_of(net)
    sync = variant.make(groups, optimizer)
    sync.attach()
    batches = tensors(batch, torch.device("cpu"), groups.world.rank)

    def steps(count: int) -> None:
        for number in range(count):
            images, labels = batches[number % len(batches)]
            (F.cross_entropy(net(images), labels) / groups.world.size).backward()
            if (number + 1) % variant.accumulate == 0:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)

    count = max(LEAST_STEPS, variant.cycle)
    steps(variant.cycle if variant.overlaps else max(WARMUP_STEPS, variant.accumulate))
    groups.world.Barrier()
    sent, started = sent_bytes(), time.perf_counter()
    steps(count)
    groups.world.Barrier()
    done = {"batch_s": (time.perf_counter() - started) / count, "sent_bytes": (sent_bytes() - sent) / count}
    sync.settle()
    return {name: max(groups.world.allgather(value)) for name, value in done.items()}


if __name__ == "__main__":
    main()
