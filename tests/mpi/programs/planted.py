"""hvdtrain.effnet with a cause planted: argv: dataset, sums or rank, then effnet's own words.

dataset: every batch is late, on all ranks; sums: those of gradients are; rank: rank 1 is slow in its forward pass.
"""

import os
import runpy
import sys
import time
from pathlib import Path

from hvdtrain.loop.feed.feed import Resident
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.tasks.vision import models

cause = sys.argv.pop(1)
this_rank = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
batches, finish, build = Resident.batches, BucketSync.finish, models.build
DELAY_S = 0.4


def late_batches(self, indices, device, *phases):
    for batch in batches(self, indices, device, *phases):
        time.sleep(DELAY_S)
        yield batch


def late_sums(self):
    time.sleep(DELAY_S)
    finish(self)


def slow_model(*args, **settings):
    model = build(*args, **settings)
    model.register_forward_pre_hook(lambda *_: time.sleep(DELAY_S))
    return model


if cause == "dataset":
    Resident.batches = late_batches
if cause == "sums":
    BucketSync.finish = late_sums
if cause == "rank" and this_rank == "1":
    models.build = slow_model
sys.argv.insert(1, "effnet")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
