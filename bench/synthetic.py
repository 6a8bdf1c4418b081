"""Training on synthetic images, put together for benches that time its steps one by one."""

import dataclasses
from pathlib import Path
from typing import Any

from hvdtrain.ranks.comm import choose_device, connect
from hvdtrain.train.training import Training, assemble
from hvdtrain.vision import images as data
from hvdtrain.vision import models
from hvdtrain.vision.config import scaled


def synthetic_training(model: str, batch: int, **settings: Any) -> Training:
    """All ranks' recipe `scaled` with these settings and `batch` images per rank and step, ready for its first step."""
    config = dataclasses.replace(scaled(), data="synthetic", model=model, batch_size_per_rank=batch, **settings)
    comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
    device = choose_device(comm)
    comm.start()
    images = data.load("synthetic", Path(), height=32, rank=comm.rank, size=comm.size, workers=1)
    training = assemble(comm, config, images, models.build(model, classes=10), device)
    training.step.model.train()
    return training
