"""One rank of a benchmark: training steps on synthetic images, timed after a warm-up.

    mpirun -np 2 python bench/steps.py OUT --model efficientnet_b0 --batch 32 --steps 12

Rank 0 writes {"images_per_s": ..., "step_ms": [...]} to OUT; images/s counts all ranks, by the median step.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from synthetic import synthetic_training

WARMUP_STEPS = 4


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--model", default="efficientnet_b0")
    arguments.add_argument("--batch", type=int, default=32, help="images per rank and step")
    arguments.add_argument("--steps", type=int, default=12)
    arguments.add_argument("--precision", default="fp32")
    arguments.add_argument("--compression", default="none")
    arguments.add_argument("--fusion-threshold-mb", type=float)
    chosen = arguments.parse_args()

    training = synthetic_training(
        chosen.model,
        chosen.batch,
        fusion_threshold_mb=chosen.fusion_threshold_mb,
        precision=chosen.precision,
        compression=chosen.compression,
        ema_epochs=0.0,
    )
    comm, device = training.step.comm, training.step.device
    step_s: list[float] = []
    for number in range(WARMUP_STEPS + chosen.steps):
        started = time.perf_counter()
        training.take(training.batch(number))
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step_s.append(time.perf_counter() - started)
    timed = step_s[WARMUP_STEPS:]
    answer = {
        "images_per_s": chosen.batch * comm.size / statistics.median(timed),
        "step_ms": [round(1000 * seconds, 2) for seconds in timed],
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    if comm.rank == 0:
        chosen.out.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
