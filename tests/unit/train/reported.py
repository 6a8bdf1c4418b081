"""A report as two ranks would make it."""

from hvdtrain.checkpoint.save_points import Asked
from hvdtrain.train.reports import Report, Totals


def report_of(step=20, **changes):
    facts = {
        "step": step,
        "steps": 20,
        "totals": Totals(loss=10.0, right=5.0, count=20.0),
        "unreadable": 0,
        "skipped": [],
        "spikes": [],
        "lr": 0.1,
        "grad_norm": 2.5,
        "loss_scale": 1024.0,
        "images_per_s": [100.0, 50.0],
        "hosts": {"usage/one/cpu_percent": 12.0},
        "visited": 40,
        "asked": Asked(save=False, leave=False),
        "end": None,
    }
    return Report(**{**facts, **changes})
