"""hvdtrain.effnet, whose ranks also note which training images they visit, one line of JSON per batch."""

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from hvdtrain import effnet
from hvdtrain.safety import exits
from hvdtrain.vision import images as data

TRAINING_IMAGES = 1438  # of the digits

original = data.Resident.batches
folder = Path(sys.argv.pop(1))
folder.mkdir(exist_ok=True)
notes = (folder / f"rank-{os.environ.get('OMPI_COMM_WORLD_RANK', '0')}.jsonl").open("a", buffering=1)


def noted(self: data.Resident, indices: Sequence[Tensor], *rest: Any) -> Iterator[tuple[Tensor, Tensor]]:
    for one, batch in zip(indices, original(self, indices, *rest), strict=True):
        if len(self) == TRAINING_IMAGES:
            notes.write(json.dumps(one.tolist()) + "\n")
        yield batch


data.Resident.batches = noted  # type: ignore[method-assign]
exits.run(effnet.main)
