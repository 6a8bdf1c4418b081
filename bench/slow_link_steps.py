"""One rank of a round of bench/slow_link.py: the same steps with each prototype, one after the other.

    mpirun -np 2 python bench/slow_link_steps.py OUT --model efficientnet_b0 --batch 16 --backwards

OUT gets for each prototype the seconds per batch and the bytes per batch that a host has sent.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from sync import ALONE
from sync.groups import Groups, groups_of
from sync.variants import VARIANTS, Variant
from two_hosts import ADDRESSES, sent_bytes
from workload import network, optimizer_of, tensors

from hvdtrain.ranks.memory import keep_freed_memory

LEAST_STEPS = 4
WARMUP_STEPS = 2


def main() -> None:
    words = argparse.ArgumentParser()
    words.add_argument("out", type=Path)
    words.add_argument("--model", required=True)
    words.add_argument("--batch", type=int, required=True)
    words.add_argument("--backwards", action="store_true")
    chosen = words.parse_args()
    keep_freed_memory()
    groups = groups_of(len(ADDRESSES))
    measure(VARIANTS[ALONE], groups, chosen.model, chosen.batch)  # a process's first steps take longer
    names = list(reversed(VARIANTS)) if chosen.backwards else list(VARIANTS)
    measured = {name: measure(VARIANTS[name], groups, chosen.model, chosen.batch) for name in names}
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
