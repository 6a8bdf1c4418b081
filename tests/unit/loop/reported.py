"""A report as two ranks would make it, an epoch, and their task."""

import torch

from hvdtrain.core.task import metrics_of
from hvdtrain.loop.hooks import EpochDone
from hvdtrain.loop.reports import Report
from hvdtrain.loop.save_points import Decision
from tests.steps import task_of

IMAGES = task_of()


def report_of(step=20, **changes):
    """`units_per_s` and `own_s` are lists by rank, `usage` has readings by rank and name, `spikes` counts its own."""
    totals = changes.pop("totals", {"loss": 10.0, "count": 20.0, "right": 5.0})
    speeds = changes.pop("units_per_s", [100.0, 50.0])
    own_s = changes.pop("own_s", [0.5, 1.0])
    usage = changes.pop("usage", {(0, "usage/one/cpu_percent"): 12.0})
    facts = {
        "step": step,
        "steps": 20,
        "unit": "images",
        "totals": totals,
        "metrics": metrics_of(IMAGES, totals),
        "unreadable": 0,
        "skipped": [],
        "loss_spikes": len(changes.get("spikes", [])),
        "spikes": [],
        "lr": 0.1,
        "grad_norm": 2.5,
        "loss_scale": 1024.0,
        "units_per_s": torch.tensor(speeds, dtype=torch.float64),
        "own_s": torch.tensor(own_s, dtype=torch.float64),
        "gauges": list(usage),
        "readings": torch.tensor(list(usage.values()), dtype=torch.float64),
        "visited": 40,
        "decision": Decision(save=False, leave=False),
        "end": None,
    }
    return Report(**{**facts, **changes})


def epoch_of(epoch=1, **changes):
    """An epoch of 600 images in 3 seconds."""
    facts = {"epoch": epoch, "epochs": 2, "step": 10 * epoch, "lr": 0.1, "samples": 600, "train_s": 3.0}
    metrics = {"train": {"loss": 1.5, "accuracy": 0.5}, "test": {"loss": 1.25, "accuracy": 0.625}}
    return EpochDone(**{**facts, **metrics, **changes})
