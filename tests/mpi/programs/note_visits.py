"""hvdtrain.effnet, whose ranks also note which training images they visit, one line of JSON per batch of an epoch."""

import json
import os
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hvdtrain.core.task import Batch
from hvdtrain.feed.feed import Resident

TRAINING_IMAGES = 1438  # of the digits

original = Resident.batches
folder = Path(sys.argv.pop(1))
folder.mkdir(exist_ok=True)
notes = (folder / f"rank-{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}.jsonl").open("a", buffering=1)


def noted(
    self: Resident, indices: Sequence[Tensor], device: torch.device, epoch: int | None, *rest: Any
) -> Iterator[Batch]:
    for samples, batch in zip(indices, original(self, indices, device, epoch, *rest), strict=True):
        if len(self) == TRAINING_IMAGES and epoch is not None:
            notes.write(json.dumps(samples.tolist()) + "\n")
        yield batch


Resident.batches = noted  # type: ignore[method-assign]
sys.argv.insert(1, "effnet")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
