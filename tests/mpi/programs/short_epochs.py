"""hvdtrain.effnet on a few of the digits, half as wide and high.

Notes in a folder, the first word, what each rank has in memory by epoch.
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import psutil

import hvdtrain
from hvdtrain import effnet
from hvdtrain.feed.feed import Resident
from hvdtrain.tracking.tracker import Tracker
from hvdtrain.vision import images
from hvdtrain.vision.settings import RECIPES, EffnetSettings, resolve

folder = Path(sys.argv.pop(1)).absolute()
digits, record_epoch = images.digits, Tracker.record_epoch
resident_mib: list[float] = []


def few() -> images.Images:
    whole = digits()
    train, test = (
        Resident(
            images=part.tensors["images"][:count, :, ::2, ::2].contiguous(),
            labels=part.tensors["labels"][:count].clone(),
        )
        for part, count in ((whole.train, 64), (whole.test, 32))
    )
    return replace(whole, train=train, test=test, height=16)


def noting(self, *arguments, **more):
    resident_mib.append(psutil.Process().memory_info().rss / 2**20)
    return record_epoch(self, *arguments, **more)


def main(run: hvdtrain.Run[EffnetSettings]) -> None:
    effnet.main(run)
    (folder / f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}.json").write_text(json.dumps(resident_mib))


images.digits, Tracker.record_epoch = few, noting
hvdtrain.start(main, *RECIPES.values(), resolve=resolve)
