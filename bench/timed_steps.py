"""One rank of a bench: training steps on synthetic images, timed after a warm-up; started by others.

    mpirun -np 2 python bench/timed_steps.py OUT --model mlp --batch 16 --steps 20 --set reducer=horovod

Rank 0 writes {"step_ms": the median, "images_per_s": of all ranks} to OUT.
"""

import argparse
import ast
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from synthetic import synthetic_training

from hvdtrain.ranks import comm as ranks
from hvdtrain.ranks import cores


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--model", default="efficientnet_b0")
    arguments.add_argument("--batch", type=int, default=16, help="images per rank and step")
    arguments.add_argument("--steps", type=int, default=20)
    arguments.add_argument("--warmup-steps", type=int, default=6)
    arguments.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="of hvdtrain.effnet")
    arguments.add_argument("--look-every-us", type=float, help="sleep so long between looks at a sum; 0 yields")
    arguments.add_argument("--spin", action="store_true", help="do not let Open MPI yield")
    chosen = arguments.parse_args()

    if chosen.spin:
        cores.count_host_cores = lambda local_size: local_size + 1
    if chosen.look_every_us is not None:
        ranks.LOOK_EVERY_S = chosen.look_every_us * 1e-6
    settings = dict(setting(word) for word in chosen.set)
    training = synthetic_training(chosen.model, chosen.batch, ema_epochs=0.0, **settings)
    comm, batch = training.step.slots.comm, training.batch()
    step_s: list[float] = []
    for _ in range(chosen.warmup_steps + chosen.steps):
        started = time.perf_counter()
        training.take(batch)
        if training.step.device.type == "cuda":
            torch.cuda.synchronize(training.step.device)
        step_s.append(time.perf_counter() - started)
    median_s = statistics.median(step_s[chosen.warmup_steps :])
    if comm.rank == 0:
        answer = {"step_ms": 1000 * median_s, "images_per_s": chosen.batch * comm.size / median_s}
        chosen.out.write_text(json.dumps(answer))


def setting(word: str) -> tuple[str, Any]:
    """A field and its value, which is a word or a number."""
    name, _, value = word.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


if __name__ == "__main__":
    main()
