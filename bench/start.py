"""How long a run takes to start: from the command until the ranks have met, and until the first step is done.

    python bench/start.py --rounds 10 --np 1,2

hvdlaunch, mpirun and horovodrun start hvdtrain, torchrun a DistributedDataParallel script of the same model. Aim: none
of ours slower than torchrun, that is no ratio above 1.

A second table has what hvdlaunch adds by itself: aims are at most 0.3 s more than bare `mpirun -np 2 true`, and
`hvdlaunch --help` in less than 0.15 s. All commands run in turns, so that each ratio compares neighbours in time.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pairs

FIRST_STEP = str(Path(__file__).with_name("first_step.py"))
HVDLAUNCH = str(Path(sys.executable).with_name("hvdlaunch"))
RUN = [HVDLAUNCH, "run", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
MOMENTS = {"init": "ranks have met, s", "step": "first step done, s"}


def launchers(ranks: int) -> dict[str, tuple[list[str], str]]:
    """Each with its program; torchrun last."""
    return {
        "hvdlaunch run": ([*RUN, "-np", str(ranks), "--"], "ours"),
        "mpirun": (pairs.mpirun(ranks), "ours"),
        "horovodrun": (["horovodrun", "-np", str(ranks)], "ours"),
        "torchrun, DDP": (pairs.torchrun(ranks), "ddp"),
    }


def start_s(launch: Sequence[str], program: str) -> dict[str, float]:
    """From the command to each of MOMENTS; ends the bench where the job fails. No file is compiled anew each time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "notes.json"
        words = [*launch, sys.executable, FIRST_STEP, str(out), program]
        env = {name: value for name, value in pairs.environment().items() if name != "PYTHONDONTWRITEBYTECODE"}
        started = time.time()
        done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: exit status {done.returncode}\n{done.stderr}")
        return {moment: at - started for moment, at in json.loads(out.read_text()).items()}


def ends_s(words: Sequence[str]) -> float:
    """From the start of a command to its end; it must succeed."""
    started = time.perf_counter()
    subprocess.run(words, env=pairs.environment(), capture_output=True, check=True)
    return time.perf_counter() - started


def to_the_first_step(ranks: int, rounds: int) -> None:
    """The first table, for one number of ranks."""
    jobs = launchers(ranks)
    turns = {name: partial(start_s, *job) for name, job in jobs.items()}
    pairs.in_turns(turns, 1)  # warms the file cache
    measured = pairs.in_turns(turns, rounds)
    table = pairs.Table(
        name=f"start-np{ranks}",
        question=f"From the command to the first step, {ranks} rank{'s' if ranks > 1 else ''}; ratios to torchrun's",
        columns=["command", *(column for text in MOMENTS.values() for column in (text, f"{text}: ratio"))],
        about={"rounds": rounds},
    )
    last = list(jobs)[-1]
    for name, rows in measured.items():
        cells: dict[str, object] = {"command": name}
        for moment, text in MOMENTS.items():
            ours, theirs = ([row[moment] for row in one] for one in (rows, measured[last]))
            cells[text] = pairs.middle(ours)
            cells[f"{text}: ratio"] = "-" if name == last else pairs.ratio(ours, theirs)
        table.add(**cells)
    table.write()


def by_itself(rounds: int) -> None:
    """The second table."""
    commands: dict[str, list[str]] = {
        "mpirun -np 2 true": [*pairs.mpirun(2), "true"],
        "hvdlaunch run -np 2 -- true": [*RUN, "-np", "2", "--", "true"],
        "hvdlaunch --help": [HVDLAUNCH, "--help"],
    }
    turns = {name: partial(ends_s, words) for name, words in commands.items()}
    pairs.in_turns(turns, 1)
    measured = pairs.in_turns(turns, rounds)
    bare = measured["mpirun -np 2 true"]
    table = pairs.Table(
        name="start-by-itself",
        question="What hvdlaunch adds to the start of a run",
        columns=["command", "s", "s more than mpirun"],
        about={"rounds": rounds},
    )
    for name, times_s in measured.items():
        more_s = "-"
        if name.startswith("hvdlaunch run"):
            more_s = str(pairs.middle([one - other for one, other in zip(times_s, bare, strict=True)]))
        table.add(**{"command": name, "s": pairs.middle(times_s), "s more than mpirun": more_s})
    table.write()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=10)
    arguments.add_argument("--np", default="1,2", help="numbers of ranks, as 1,2")
    chosen = arguments.parse_args()
    for ranks in chosen.np.split(","):
        to_the_first_step(int(ranks), chosen.rounds)
    by_itself(chosen.rounds)


if __name__ == "__main__":
    main()
