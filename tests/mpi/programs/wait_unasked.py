"""hvdtrain.effnet with SIGUSR1 blocked, as a launcher may leave it. Says so, then waits."""

import os
import runpy
import signal
import sys
import time
from pathlib import Path

signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
folder = Path(sys.argv.pop(1))
folder.mkdir(exist_ok=True)
(folder / f"rank-{os.environ['OMPI_COMM_WORLD_RANK']}").touch()
while signal.SIGUSR1 not in signal.sigpending():
    time.sleep(0.01)
sys.argv.insert(1, "effnet")
runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
