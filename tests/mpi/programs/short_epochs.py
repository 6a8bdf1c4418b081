"""hvdtrain.effnet, whose ranks note what they have in memory by epoch. argv: folder, then effnet's own words."""

import json
import os
import runpy
import sys
from pathlib import Path

import psutil

from hvdtrain.insight.tracking.tracker import Tracker

file = Path(sys.argv.pop(1)).absolute() / f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}.json"
record_epoch, resident_mib = Tracker.record_epoch, list[float]()


def noting(self, *arguments, **more):
    resident_mib.append(psutil.Process().memory_info().rss / 2**20)
    file.write_text(json.dumps(resident_mib))
    return record_epoch(self, *arguments, **more)


Tracker.record_epoch = noting
sys.argv[1:1] = ["effnet", "--images=64"]
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
