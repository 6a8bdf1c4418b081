"""A report as two ranks would make it, and how a tracker takes it in."""

from hvdtrain.checkpoint.save_points import Decision
from hvdtrain.record.tracker import Measures
from hvdtrain.train.reports import Report
from tests.steps import task_of

IMAGES = Measures(unit="images", metrics=("loss", "accuracy"), best_metric="accuracy")


def report_of(step=20, **changes):
    totals = changes.pop("totals", {"loss": 10.0, "count": 20.0, "right": 5.0})
    facts = {
        "step": step,
        "steps": 20,
        "unit": "images",
        "totals": totals,
        "metrics": task_of().metrics(totals),
        "unreadable": 0,
        "skipped": [],
        "spikes": [],
        "lr": 0.1,
        "grad_norm": 2.5,
        "loss_scale": 1024.0,
        "units_per_s": [100.0, 50.0],
        "hosts": {"usage/one/cpu_percent": 12.0},
        "visited": 40,
        "decision": Decision(save=False, leave=False),
        "end": None,
    }
    return Report(**{**facts, **changes})


def tracked(tracker, report):
    """As a script does it."""
    tracker.report(report.step, report.scalars(), happened=report.events(), counts=report.counts())
