"""Every rank writes rank-<r>.json into the folder it is given; then all meet again and again until `seconds` are over.

With `--fail HOST STATUS` the ranks of one host end with that status at once.
"""

import argparse
import json
import os
import time
from pathlib import Path

from mpi4py import MPI

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--seconds", type=float, default=0)
parser.add_argument("--fail", nargs=2)
args = parser.parse_args()

comm = MPI.COMM_WORLD
host = os.uname().nodename
facts = {"rank": comm.rank, "local_rank": int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]), "host": host}
unfinished = args.folder / f"rank-{comm.rank}.tmp"
unfinished.write_text(json.dumps(facts))
unfinished.rename(unfinished.with_suffix(".json"))
comm.Barrier()
if args.fail and args.fail[0] == host:
    os._exit(int(args.fail[1]))
end = time.monotonic() + args.seconds
while comm.allreduce(time.monotonic() < end, op=MPI.LAND):
    time.sleep(0.02)
