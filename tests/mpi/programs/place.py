"""Every rank writes rank-<r>.json into the folder it is given: its place, as the launcher and bind left it.

    place.py FOLDER                        then it ends
    place.py FOLDER --end RANK HOW         that rank ends with this status, or of SIGKILL, the others stay
    place.py FOLDER --stay                 it stays, and notes its signals in rank-<r>.signals; only SIGKILL ends it
    place.py FOLDER --stay --deaf          the same, without a handler for SIGUSR1 until the folder has a file named go

Standard library only: such a rank is started in a tenth of a second.
"""

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

from hvdtrain.insight.tracking.environment import read_plan

PR_GET_PDEATHSIG = 2
PASSED_ON = ("CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--end", nargs=2, metavar=("RANK", "HOW"))
parser.add_argument("--stay", action="store_true")
parser.add_argument("--deaf", action="store_true")
args = parser.parse_args()

names = ("OMPI_COMM_WORLD_RANK", "SLURM_PROCID"), ("OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")
rank, local_rank = (next(int(os.environ[name]) for name in either if name in os.environ) for either in names)


def note(number: int, _: object) -> None:
    with (args.folder / f"rank-{rank}.signals").open("a") as file:
        file.write(f"{signal.Signals(number).name}\n")


def listen() -> None:
    signal.signal(signal.SIGUSR1, note)


blocked = sorted(signal.Signals(number).name for number in signal.pthread_sigmask(signal.SIG_BLOCK, []))
if args.stay:
    signal.signal(signal.SIGTERM, note)
    if not args.deaf:
        listen()
death_signal = ctypes.c_int()
ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(death_signal))
facts = {
    "rank": rank,
    "local_rank": local_rank,
    "pid": os.getpid(),
    "host": os.uname().nodename,
    "folder": str(Path.cwd()),
    "argv": sys.argv,
    "cores": sorted(os.sched_getaffinity(0)),
    "session": os.getsid(0),
    "blocked": blocked,
    "death_signal": death_signal.value,
    "environment": {name: os.environ[name] for name in os.environ if name in PASSED_ON or name.startswith("NCCL_")},
    "planned_on": read_plan(os.environ["HVDLAUNCH_PLAN"])["ranks"][rank]["host"],
    "inside": os.environ.get("INSIDE"),
}
unfinished = args.folder / f"rank-{rank}.part"
unfinished.write_text(json.dumps(facts))
unfinished.rename(unfinished.with_suffix(".json"))

if args.end and int(args.end[0]) == rank:
    if args.end[1] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(args.end[1]))
while args.deaf and not (args.folder / "go").exists():
    time.sleep(0.02)
if args.deaf:
    listen()
while args.stay or args.end:
    time.sleep(0.1)
