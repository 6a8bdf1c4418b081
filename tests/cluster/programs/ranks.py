"""Every rank writes rank-<r>.json into the folder it is given; then all meet again until `seconds` are over."""

import argparse
import json
import os
import time
from pathlib import Path

from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--seconds", type=float, default=0)
args = parser.parse_args()

comm = MPI.COMM_WORLD
facts = {"rank": comm.rank, "host": os.uname().nodename}
unfinished = args.folder / f"rank-{comm.rank}.tmp"
unfinished.write_text(json.dumps(facts))
unfinished.rename(unfinished.with_suffix(".json"))
comm.Barrier()
end = time.monotonic() + args.seconds
while comm.allreduce(time.monotonic() < end, op=MPI.LAND):
    time.sleep(0.02)
