"""Kills a random rank of `hvdlaunch run --restarts` every few seconds of training, and measures cost and effect.

Ranks train efficientnet_tiny on the digits. Goodput is the time from the first step to the end of an undisturbed run,
divided by that of a run with kills and equally many epochs. A short run determines their number.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.jobs import environment, hvdlaunch
from bench.pairs import Case, Table, in_turns, middle, ratio

PROGRAM = "hvdtrain.effnet"
TRAIN = "--data digits --model efficientnet_tiny --batch-size-per-rank 32 --checkpoint-every 10steps --run r"
TRIAL_EPOCHS = 10


def train(
    ranks: int, epochs: int, *, options: Sequence[str] = (), every_s: float = 0.0, seed: int = 0
) -> dict[str, Any]:
    """Return the result of a run; a rank is killed each time that all have trained for this time, 0 for never.

    It also has `seconds` from the first step to the end, `kills`, `lost_s` from each kill until all ranks trained
    again, and the hashes of the `weights` of all ranks. A run that fails ends the benchmark.
    """
    draws, kills, began_s, since_s = random.Random(seed), 0, 0.0, 0.0  # noqa: S311 (who is killed)
    killed_s: float = 0.0
    lost_s: list[float] = []
    with tempfile.TemporaryDirectory() as name:
        run, log = Path(name) / "runs/effnet/r", Path(name) / "log"
        command = [*hvdlaunch(ranks, "--gpus", "none", *options), sys.executable, "-m", PROGRAM, *TRAIN.split()]
        command += ["--epochs", str(epochs)]
        with log.open("w") as output:
            job = subprocess.Popen(command, cwd=name, env=environment(), stdout=output, stderr=output)
        try:
            while job.poll() is None:
                time.sleep(0.1)
                pids = pids_of(run)
                since_s = (since_s or time.monotonic()) if len(pids) == ranks and is_in_a_step(run) else 0.0
                began_s = began_s or since_s
                if killed_s and since_s:
                    lost_s.append(since_s - killed_s)
                    killed_s = 0.0
                if every_s and since_s and time.monotonic() > since_s + every_s:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(draws.choice(pids), signal.SIGKILL)
                        kills, since_s, killed_s = kills + 1, 0.0, time.monotonic()
            seconds = time.monotonic() - began_s
        finally:
            job.kill()  # takes mpirun and all ranks with it
            job.wait()
        if job.returncode:
            sys.exit(f"{log.read_text()}\n{' '.join(command)}: exit status {job.returncode}")
        of_ranks = [json.loads(file.read_text()) for file in run.glob("ranks/rank-*.json")]
        weights = frozenset(one["weights_sha256"] for one in of_ranks if "weights_sha256" in one)
        result = json.loads((run / "result.json").read_text())
        return {**result, "seconds": seconds, "kills": kills, "lost_s": lost_s, "weights": weights}


def is_in_a_step(run: Path) -> bool:
    with contextlib.suppress(OSError):
        return (run / "ranks/rank-0.at").read_text().startswith("step")
    return False


def pids_of(run: Path) -> list[int]:
    """Return the process ids of the living ranks, according to their files."""
    pids = []
    for file in sorted(run.glob("ranks/rank-*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
            process = psutil.Process(json.loads(file.read_text())["pid"])
            if PROGRAM in process.cmdline():  # empty after it has ended
                pids.append(process.pid)
    return pids


def goodput(chosen: argparse.Namespace) -> Table:
    """The share of an undisturbed run's speed that is left when ranks are killed; both save every 10 steps."""
    trial = train(chosen.np, TRIAL_EPOCHS)
    epochs = max(1, round(TRIAL_EPOCHS * 60 * chosen.minutes / trial["train_time_s"]))
    table = Table(
        name="goodput",
        question=f"Of {chosen.np} ranks one is killed after each {chosen.every_s:g} s of training: what is left?",
        columns=[
            *("lost ranks", "kills", "s from a kill until all train", "s", "undisturbed s", "goodput"),
            *("accuracy %", "undisturbed %", "weights"),
        ],
        conditions={"epochs": epochs},
    )
    undisturbed = partial(train, chosen.np, epochs)
    killed = partial(undisturbed, options=["--restarts", "1000"], every_s=chosen.every_s, seed=chosen.seed)
    whole, left = in_turns({"": undisturbed, "killed": killed}, chosen.rounds).values()
    left_s, whole_s = ([one["seconds"] for one in runs] for runs in (left, whole))
    accuracies = [middle([100 * one["eval_accuracy"] for one in runs]) for runs in (left, whole)]
    same = len({one["weights"] for one in (*whole, *left)}) == len(whole[0]["weights"]) == 1
    lost_s = [seconds for one in left for seconds in one["lost_s"]]
    speeds = (middle(lost_s) if lost_s else None, middle(left_s), middle(whole_s), ratio(whole_s, left_s))
    kills = sum(one["kills"] for one in left)
    table.add("`--restarts`", kills, *speeds, *accuracies, "bit-equal" if same else "others")
    return table


KILLS = {"minutes": 3.0, "every-s": 15.0, "np": 3, "seed": 0, "rounds": 1}
CASES = {"goodput": Case(measure=goodput, options=KILLS)}
