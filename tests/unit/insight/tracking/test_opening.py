from pathlib import Path

import pytest

from hvdtrain.insight.tracking.console import Console
from hvdtrain.insight.tracking.opening import FEW_STEPS, opening_lines, warn_of_few_steps

SIZES = {"train_samples": 1438, "test_samples": 359, "classes": 10, "parameters": 12_345, "steps": 9, "epochs": 3}
BATCH = {"accumulate_steps": 1, "micro_batch": 256, "global_batch": 512, "global_batch_size": None}
KNOWN = {"data": "digits", "model": "efficientnet_tiny", **SIZES, **BATCH}


def test_a_run_says_its_size_in_five_lines():
    gpus = [{"host": host, "device": "cuda:0", "device_name": name} for host, name in (("one", "H100"), ("two", "L4"))]
    lines = opening_lines(KNOWN, gpus, unit="images", folder=Path("runs/effnet/r"))
    assert lines == [
        "data: digits, 1,438 images to train on, 359 to test with, 10 classes",
        "model: efficientnet_tiny, 12,345 parameters",
        "ranks: 2 on 2 hosts; 1 x H100, 1 x L4",
        "global batch: 512 images (2 replicas x 256); 9 steps in 3 epochs",
        "run folder: runs/effnet/r",
    ]


@pytest.mark.parametrize(
    ("changed", "warning"),
    [
        ({"steps": FEW_STEPS}, None),
        ({"steps": 6}, "3 epochs are 6 steps: few models learn in fewer than 30. Lower --batch-size-per-rank"),
        ({"global_batch_size": 192, "max_steps": 9}, "Lower --global-batch-size or raise --max-steps."),
    ],
)
def test_a_run_of_too_few_steps_is_named(capsys, changed, warning):
    warn_of_few_steps({**KNOWN, **changed}, Console(is_shown=True))
    found = capsys.readouterr().out.splitlines()
    assert len(found) == (warning is not None)
    assert all(line.startswith("hvdtrain: warning: ") and warning in line for line in found)
