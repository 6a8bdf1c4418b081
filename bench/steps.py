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
from torch.amp.grad_scaler import GradScaler

from hvdtrain.ranks.comm import choose_device, connect
from hvdtrain.train import optim
from hvdtrain.train.loop import Pictures
from hvdtrain.train.step import TrainingStep
from hvdtrain.vision import images as data
from hvdtrain.vision import models

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

    comm = connect(fusion_threshold_mb=chosen.fusion_threshold_mb, cycle_time_ms=None)
    device = choose_device(comm)
    comm.start()
    images = data.load("synthetic", Path(), height=32, rank=comm.rank, size=comm.size, workers=1)
    torch.manual_seed(0)
    model = models.build(chosen.model, classes=10).to(device)
    comm.broadcast_(model)
    model = model.to(memory_format=torch.channels_last)
    step = TrainingStep(
        model=model.train(),
        optimizer=optim.build("sgd", optim.parameter_groups(model, 5e-4, decay_all=False), 0.1),
        comm=comm,
        sync=comm.gradient_sync(model, compression=chosen.compression),
        scaler=GradScaler(device.type, enabled=chosen.precision == "fp16"),
        precision=chosen.precision,
        label_smoothing=0.1,
        clip_value=None,
        clip_norm=None,
    )
    pictures = Pictures(
        mean=torch.zeros(3, device=device),
        std=torch.ones(3, device=device),
        crop=False,
        flip=False,
        cutout=0,
        memory_format=torch.channels_last,
    )
    everything = torch.arange(chosen.batch * (WARMUP_STEPS + chosen.steps)) + comm.rank * chosen.batch
    step_s: list[float] = []
    for raw, labels in images.train.batches(data.pieces(everything, chosen.batch), device):
        started = time.perf_counter()
        step([(pictures.for_evaluation(raw), labels)], passes=1, global_count=chosen.batch * comm.size, lr=0.01)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        step_s.append(time.perf_counter() - started)
    timed = step_s[WARMUP_STEPS:]
    answer = {
        "images_per_s": chosen.batch * comm.size / statistics.median(timed),
        "step_ms": [round(1000 * one, 2) for one in timed],
        "threads": torch.get_num_threads(),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
    }
    if comm.rank == 0:
        chosen.out.write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
