"""Rank 0 reports steps in a run folder, as hvdtrain does, and prints each, until there is a file `enough`."""

import itertools
import json
import os
import time
from pathlib import Path

from hvdtrain.settings.safety.exits import report

folder, enough = Path("runs/mine").resolve(), Path("enough")
if os.environ["RANK"] == "0":
    folder.mkdir(parents=True, exist_ok=True)
    report(run_folder=str(folder))
for step in itertools.count(20, 20):
    time.sleep(0.3)
    if os.environ["RANK"] == "0":
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "seconds": step / 10, "train/images_per_s": 2345.6}) + "\n")
        report(doing=f"step {step:,}, 2,346 images/s")
        print(f"step {step}", flush=True)
    if enough.exists():
        break
