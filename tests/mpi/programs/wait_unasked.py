"""hvdtrain.effnet that takes its time to start: it says that it is there, then waits for a file named go."""

import os
import runpy
import sys
import time
from pathlib import Path

folder = Path(sys.argv.pop(1))
folder.mkdir(exist_ok=True)
(folder / f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}").touch()
while not (folder / "go").exists():
    time.sleep(0.01)
sys.argv.insert(1, "effnet")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
