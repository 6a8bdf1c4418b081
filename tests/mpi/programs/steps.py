"""Every rank takes steps and meets the others after each, as a training does; what hvdlaunch must know of it is kept.

    steps.py FOLDER                            40 steps of 20 ms, a checkpoint after every fifth one
    steps.py FOLDER --fault RANK STEP WHAT     in the first attempt: kill or hang
    steps.py FOLDER --takes 4,2                other numbers of ranks are bad input
    steps.py FOLDER --obstinate                it says that it saves at SIGUSR1, and goes on
    steps.py FOLDER --until FILE               after its steps it goes on until there is such a file

The run folder is FOLDER/<HVDLAUNCH_JOB>; rank 0 adds a line for each attempt to its file attempts.jsonl. Ranks meet in
files, without MPI: with the standard library alone a rank is started in a tenth of a second.
"""

import argparse
import faulthandler
import json
import math
import os
import signal
import sys
import time
from pathlib import Path

from hvdtrain.insight.tracking.environment import read_plan

WORKS_S, WAITS_S = 4.0, 6.0  # how long a step may take, and the wait for the others

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--fault", nargs=3, metavar=("RANK", "STEP", "WHAT"))
parser.add_argument("--takes", default="")
parser.add_argument("--obstinate", action="store_true")
parser.add_argument("--until", type=Path)
args = parser.parse_args()

rank, ranks = int(os.environ["OMPI_COMM_WORLD_RANK"]), int(os.environ["OMPI_COMM_WORLD_SIZE"])
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
run = args.folder / os.environ["HVDLAUNCH_JOB"]
meeting = run / f"meeting-{attempt}"
meeting.mkdir(parents=True, exist_ok=True)
(run / "ranks").mkdir(exist_ok=True)
errors = (run / "ranks" / f"rank-{rank}.err").open("w")
checkpoint = run / "checkpoint"
asked: list[int] = []
until = [math.inf]  # on time.monotonic(): when the timer fires


def put(file: Path, text: str) -> None:
    beside = file.with_name(f"{file.name}.part-{rank}")
    beside.write_text(text)
    beside.replace(file)


def report(**facts: str) -> None:
    if rank == 0:
        path = Path(os.environ["HVDLAUNCH_REPORT"])
        known = json.loads(path.read_text()) if path.exists() else {}
        put(path, json.dumps({**known, **facts}))


def at(words: str, limit_s: float = math.inf) -> None:
    """Note where this rank is, for at most so long; a rank that was stopped for longer leaves its line as it was."""
    if time.monotonic() > until[0]:
        return
    put(run / "ranks" / f"rank-{rank}.at", f"{words:<63}\n")
    until[0] = time.monotonic() + limit_s
    faulthandler.cancel_dump_traceback_later()
    if limit_s < math.inf:
        faulthandler.dump_traceback_later(limit_s, exit=True, file=errors)


def meet(step: int) -> set[str]:
    """Wait for all ranks; return their words: `leave` after a request, `enough` once --until FILE exists, or `stay`."""
    at(f"step {step} waiting", WAITS_S)
    enough = "enough" if args.until and args.until.exists() else "stay"
    put(meeting / f"{step}-{rank}", "leave" if asked and not args.obstinate else enough)
    there = [meeting / f"{step}-{other}" for other in range(ranks)]
    while not all(file.exists() for file in there):
        time.sleep(0.005)
    return {file.read_text() for file in there}


def save(step: int) -> None:
    if rank == 0:
        put(checkpoint, str(step))
    report(checkpoint=str(step))


def main() -> str:
    """How it ended."""
    start = int(checkpoint.read_text()) if checkpoint.exists() else 0
    at("start working")
    signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
    report(run_folder=str(run))
    if rank == 0:
        hosts = [one["host"] for one in read_plan(os.environ["HVDLAUNCH_PLAN"])["ranks"]]
        line = {"attempt": attempt, "ranks": ranks, "hosts": hosts, "from": start}
        with (run / "attempts.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    meet(start)
    report(saves="yes")
    for step in range(start + 1, sys.maxsize):
        at(f"step {step} working", WORKS_S)
        if args.fault and attempt == 0 and [rank, step] == [int(word) for word in args.fault[:2]]:
            if args.fault[2] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(1000)
        time.sleep(0.02)
        said = meet(step)
        if "leave" in said or step % 5 == 0:
            save(step)
        if "leave" in said:
            return "preempted"
        if step >= args.steps and (args.until is None or "enough" in said):
            return "finished"
    raise AssertionError


if args.takes and str(ranks) not in args.takes.split(","):
    if rank == 0:
        line = f"steps: {ranks} ranks do not divide 12"
        print(line, file=sys.stderr, flush=True)
        report(run_folder=str(run), said=line)
    while not Path(os.environ["HVDLAUNCH_REPORT"]).exists():  # MPI_Finalize waits for rank 0, too
        time.sleep(0.05)
    sys.exit(2)
reason = main()
faulthandler.cancel_dump_traceback_later()
report(exit_reason=reason)
