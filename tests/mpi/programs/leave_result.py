"""A program as hvdlaunch sweep wants it: rank 0 reports a run folder and leaves a result in it.

leave_result.py BAD_SIZE SLOW_SIZE    the last rank of BAD_SIZE ends with 3, the ranks of SLOW_SIZE do not end
"""

import json
import os
import sys
import time
from pathlib import Path

rank, size = (int(os.environ[f"OMPI_COMM_WORLD_{name}"]) for name in ("RANK", "SIZE"))
bad_size, slow_size = map(int, sys.argv[1:])
folder = Path("runs", os.environ["HVDLAUNCH_JOB"]).resolve()
if rank == 0:
    folder.mkdir(parents=True, exist_ok=True)
    Path(os.environ["HVDLAUNCH_REPORT"]).write_text(json.dumps({"run_folder": str(folder)}))
    (folder / "config.json").write_text(json.dumps({"seed": int(os.environ["HVDLAUNCH_SEED"])}))
if size == slow_size:
    time.sleep(120)
if rank == 0:
    (folder / "result.json").write_text(json.dumps({"exit_reason": "finished", "np": size}))
if size == bad_size and rank == size - 1:
    while not (folder / "config.json").exists():  # the run ends with this rank
        time.sleep(0.01)
    sys.exit(3)
