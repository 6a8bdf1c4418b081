"""What a run is, told before its first step."""

import json
import os
import platform
import socket
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from hvdtrain.ranks.comm import Comm
from hvdtrain.record import tracker as tracking
from hvdtrain.record.events import Column
from hvdtrain.train.training import Training, compression
from hvdtrain.vision.config import EffnetConfig


def describe_run(
    comm: Comm,
    config: EffnetConfig,
    folder: Path,
    device: torch.device,
    training: Training,
    *,
    memory: Mapping[str, Any] | None,
) -> tracking.Tracker:
    """Write what is known before the first step; the tracker for what follows."""
    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "local_rank": comm.local_rank,
        "pid": os.getpid(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else platform.processor(),
        "cores": sorted(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
    }
    placement = [{"rank": rank, **one} for rank, one in enumerate(comm.gather(facts))]
    result = {
        "np": comm.size,
        "hosts": sorted({one["host"] for one in placement}),
        "model": config.model,
        "data": config.data,
        "recipe": config.recipe,
        "epochs": config.epochs,
        "global_batch": training.global_batch,
    }
    tracker = tracking.Tracker(folder, writes=comm.rank == 0, result=result, memory=memory)
    derived = {
        "global_batch": training.global_batch,
        "steps_per_epoch": training.steps_per_epoch,
        "peak_lr": training.lr.peak,
        "compression": compression(config, device),
    }
    tracker.rank_facts(comm.rank, **facts)
    environment = tracking.environment()
    tracker.describe(
        columns=columns(comm, config, derived),
        command=environment["command"],
        config={**asdict(config), "derived": derived},
        environment=environment,
        placement={"ranks": placement, "plan": json.loads(os.environ.get("HVDLAUNCH_PLAN", "null"))},
    )
    return tracker


def columns(comm: Comm, config: EffnetConfig, derived: Mapping[str, Any]) -> list[Column]:
    """The settings by which a person compares runs, the same ones for every run."""
    return [
        Column(name="ranks", value=comm.size, first=True),
        Column(name="recipe", value=config.recipe, first=True),
        Column(name="model", value=config.model, first=True),
        Column(name="global_batch", value=derived["global_batch"], first=True),
        Column(name="peak_lr", value=derived["peak_lr"], first=True),
        Column(name="optimizer", value=config.optimizer),
        Column(name="data", value=config.data),
        Column(name="epochs", value=config.epochs),
        Column(name="precision", value=config.precision),
        Column(name="compression", value=derived["compression"]),
        Column(name="sync_bn", value="yes" if config.sync_bn else "no"),
        Column(name="seed", value=config.seed),
    ]
