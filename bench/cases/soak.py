"""Faults of many kinds at random moments of `hvdlaunch run --restarts`, and what must hold after each run.

Ranks train efficientnet_tiny on the digits (bench/soaked.py); each run gets one fault after another until it ends. Runs
are kept in build/bench/soak-*.jsonl, so a case that was cut off continues.
"""

import argparse
import contextlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import psutil

from bench.cases.kills import is_in_a_step
from bench.jobs import HERE, environment, hvdlaunch
from bench.pairs import RESULTS, Case, Table, middle
from bench.soaked import HANG, RAISE

TRAIN = (
    "effnet --data digits --model efficientnet_tiny --images=768 --batch-size-per-rank 32 --epochs 40 --run r "
    "--deterministic --checkpoint-every 10steps"
)
RANKS = (2, 3)
WAIT_S = (0.05, 0.5)  # of training before a fault
LAST_STEPS = 5  # without a fault
MORE_STEPS = 3  # also before it: after three restarts without a new state hvdlaunch gives up
AT_ONCE_S = 0.1  # after ranks have started again
POLL_S = 0.05
STUCK_S = 120.0  # without training and without an end
LEFT_S = 3.0  # until all of a run is gone


class Run:
    """A run in this folder, its processes, and its faults so far."""

    def __init__(self, folder: Path, ranks: int, draws: random.Random) -> None:
        self.folder, self.draws, self.ranks = folder, draws, ranks
        self.faults: list[dict[str, Any]] = []
        self.path = folder / "runs/effnet/r"
        words = [*hvdlaunch(ranks, "--gpus", "none", "--restarts", "1000"), sys.executable, str(HERE / "soaked.py")]
        with (folder / "log").open("w") as log:
            self.job = psutil.Popen([*words, *TRAIN.split()], cwd=folder, env=environment(), stdout=log, stderr=log)

    def pids(self) -> list[int]:
        """Return the processes of all ranks that have started and live, by rank."""
        pids = []
        for file in sorted(self.path.glob("ranks/rank-*.json")):
            with contextlib.suppress(OSError, ValueError, KeyError, psutil.Error):
                process = psutil.Process(json.loads(file.read_text())["pid"])
                if process.status() != psutil.STATUS_ZOMBIE and Path(process.cwd()) == self.folder:
                    pids.append(process.pid)
        return pids

    def wait_for_training(self, other_than: Sequence[int] = ()) -> list[int]:
        """Return the ranks once all train, none of which is one of these; none after the end."""
        end = time.monotonic() + STUCK_S
        while self.job.poll() is None:
            pids = self.pids()
            if len(pids) == self.ranks and set(pids).isdisjoint(other_than) and is_in_a_step(self.path):
                return pids
            if time.monotonic() > end:
                raise TimeoutError(f"no training for {STUCK_S:g} s")
            time.sleep(POLL_S)
        return []

    def train(self, steps: int) -> None:
        """Return once this number of steps more have begun, or the run has ended."""
        began, seen = time.monotonic(), set[bytes]()
        while len(seen) <= steps and self.job.poll() is None and time.monotonic() < began + STUCK_S:
            with contextlib.suppress(OSError):
                seen |= {(self.path / "ranks/rank-0.at").read_bytes().partition(b" work")[0].partition(b" wait")[0]}
            time.sleep(POLL_S)

    def is_ending(self) -> bool:
        """Return whether the run has ended, or its last steps have begun: no watchdog sees a rank that has trained."""
        at = re.match(r"step (\d+)", (self.path / "ranks/rank-0.at").read_text())
        steps = json.loads((self.path / "config.json").read_text())["derived"]["steps"]
        return self.job.poll() is not None or (at is not None and int(at[1]) > steps - LAST_STEPS)

    def wait(self) -> int:
        """Return the exit status once the run has ended; TimeoutError if it stands still for STUCK_S."""
        at, since_s = b"", time.monotonic()
        while (status := self.job.poll()) is None:
            time.sleep(POLL_S)
            with contextlib.suppress(OSError):
                at, before = (self.path / "ranks/rank-0.at").read_bytes(), at
                since_s = since_s if at == before else time.monotonic()
            if time.monotonic() > since_s + STUCK_S:
                raise TimeoutError(f"no progress and no end for {STUCK_S:g} s")
        return int(status)

    def child(self, name: str) -> int | None:
        """Return the process below hvdlaunch with this word in its command line."""
        for process in self.job.children(recursive=True):
            with contextlib.suppress(psutil.Error):  # it has just ended
                if any(re.fullmatch(name, Path(word).name) for word in process.cmdline()[:2]):
                    return process.pid
        return None

    def descriptors(self) -> int | None:
        """Return how many descriptors hvdlaunch has open; None after its end."""
        with contextlib.suppress(psutil.Error):
            return int(self.job.num_fds())
        return None


def send(number: int, *pids: int | None) -> None:
    """Send a signal to the processes that still live."""
    for pid in filter(None, pids):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def kill_again(run: Run, pids: list[int]) -> list[int]:
    """Kill a rank, and one of the next ranks as soon as it has started; return the next ranks."""
    send(signal.SIGKILL, run.draws.choice(pids))
    end = time.monotonic() + STUCK_S
    while not (fresh := sorted({*run.pids()} - {*pids})) and run.job.poll() is None and time.monotonic() < end:
        time.sleep(POLL_S)
    time.sleep(run.draws.uniform(0.0, AT_ONCE_S))
    send(signal.SIGKILL, *fresh[:1])
    return fresh


def kill_keeper(run: Run, pids: list[int]) -> None:
    """Kill the keeper before a rank."""
    send(signal.SIGKILL, run.child(r"keeper\.py"), run.draws.choice(pids))


KINDS: dict[str, Callable[[Run, list[int]], list[int] | None]] = {
    "a rank killed": lambda run, pids: send(signal.SIGKILL, run.draws.choice(pids)),
    "rank 0 killed": lambda _, pids: send(signal.SIGKILL, pids[0]),
    "two ranks killed": lambda run, pids: send(signal.SIGKILL, *run.draws.sample(pids, 2)),
    "killed again at the start": kill_again,
    "a rank stopped": lambda run, pids: send(signal.SIGSTOP, run.draws.choice(pids)),
    "a rank hangs": lambda run, pids: send(HANG, run.draws.choice(pids)),
    "a rank raises": lambda run, pids: send(RAISE, run.draws.choice(pids)),
    "keeper and a rank killed": kill_keeper,
    "mpirun killed": lambda run, _: send(signal.SIGKILL, run.child("mpirun|prterun")),
}


# Those that take long: ranks and keeper import again, or the watchdog has to notice.
RARE = {"keeper and a rank killed": 0.1, "a rank stopped": 0.5, "a rank hangs": 0.5}


def disturbed(number: int, draws: random.Random, *, ranks: int, faults: int) -> dict[str, Any]:
    """Return what became of a run with at most this number of faults."""
    before = shared_memory()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        run = Run(Path(name).resolve(), ranks, draws)
        why = descriptors = None
        try:
            pids = run.wait_for_training()
            while pids and len(run.faults) < faults:
                time.sleep(draws.uniform(*WAIT_S))
                run.train(MORE_STEPS)
                [kind] = draws.choices(list(KINDS), [RARE.get(kind, 1.0) for kind in KINDS])
                if run.is_ending():
                    break
                began_s = time.monotonic()
                run.faults.append({"kind": kind, "s": None})
                more = KINDS[kind](run, pids) or ()
                pids = run.wait_for_training(other_than=[*pids, *more])
                run.faults[-1]["s"] = round(time.monotonic() - began_s, 2) if pids else None
                descriptors = descriptors or (pids and run.descriptors())
            opened = run.descriptors() if pids else None
            status = run.wait()
        except TimeoutError as error:
            status, opened, why = None, None, str(error)
            run.job.kill()
        left = [*leftovers(run.folder), *sorted(shared_memory() - before)]
        with contextlib.suppress(psutil.NoSuchProcess):
            run.job.kill()
        run.job.wait()
        results = [json.loads(file.read_text()) for file in run.path.glob("ranks/rank-*.json")]
        weights = sorted({one["weights_sha256"] for one in results if "weights_sha256" in one})
        answer = {
            "run": number,
            "ranks": ranks,
            "faults": run.faults,
            "status": status,
            "weights": weights,
            "left": left,
            "descriptors": [descriptors, opened],
        }
        if status or status is None or len(weights) != 1 or left:
            answer["log"] = why, (run.folder / "log").read_text()[-20_000:]
        return answer


def shared_memory() -> set[str]:
    """Return the names in /dev/shm that no living process has mapped or opened."""
    used = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            used += maps.read_text()
    return {str(path) for path in Path("/dev/shm").iterdir() if str(path) not in used}  # noqa: S108


def leftovers(folder: Path) -> list[str]:
    """Return the processes that still work in the folder after LEFT_S, and end them."""
    end = time.monotonic() + LEFT_S
    while (found := list(processes_in(folder))) and time.monotonic() < end:
        time.sleep(POLL_S)
    names = [" ".join(process.info["cmdline"] or [process.info["name"]])[:200] for process in found]
    for process in found:
        with contextlib.suppress(psutil.Error):
            process.kill()
    return names


def processes_in(folder: Path) -> Iterator[psutil.Process]:
    for process in psutil.process_iter(["cwd", "cmdline", "name", "status"]):
        if process.info["cwd"] == str(folder) and process.info["status"] != psutil.STATUS_ZOMBIE:
            yield process


def problems(answer: dict[str, Any]) -> list[str]:
    """Return what does not hold of a run."""
    first, last = answer["descriptors"]
    found = {
        f"status {answer['status']}": answer["status"] != 0,
        "other weights": answer["status"] == 0 and answer["weights"] != undisturbed(answer["ranks"]),
        f"left: {', '.join(answer['left'])}": bool(answer["left"]),
        f"{first} descriptors of hvdlaunch, then {last}": first and last and last > first,
    }
    return [text for text, is_so in found.items() if is_so]


@cache
def undisturbed(ranks: int) -> list[str]:
    """Return the hashes of the weights of a run without faults."""
    return list(disturbed(0, random.Random(), ranks=ranks, faults=0)["weights"])  # noqa: S311


def soak(chosen: argparse.Namespace) -> Table:
    """Faults at random moments: are the weights bit-identical, and is nothing lost or left? Status 1 if not.

    Each run of 2 or 3 ranks gets up to --per-run faults, until there were --faults with this --seed and the MPI of the
    environment; the same command continues. The ranks are found by their files, and hvdlaunch's processes as its
    children.
    """
    version = subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout.split()[3]
    kept = RESULTS.resolve() / f"soak-{chosen.seed}-{version}.jsonl"
    kept.parent.mkdir(parents=True, exist_ok=True)
    answers = [json.loads(line) for line in kept.read_text().splitlines()] if kept.exists() else []
    while sum(len(answer["faults"]) for answer in answers) < chosen.faults:
        number = len(answers) + 1
        draws = random.Random(f"{chosen.seed} {number}")  # noqa: S311
        answers.append(disturbed(number, draws, ranks=draws.choice(RANKS), faults=chosen.per_run))
        with kept.open("a") as file:
            file.write(f"{json.dumps(answers[-1])}\n")
        print(f"run {len(answers)}: {len(answers[-1]['faults'])} faults", *problems(answers[-1]), sep=", ", flush=True)
    table = Table(
        name="soak",
        question=f"Faults at random moments of {len(answers)} runs of 2 or 3 ranks: what became of the runs?",
        columns=["fault", "n", "s until all train", "worst s"],
        conditions={"MPI": version, "seed": chosen.seed},
    )
    faults = [fault for answer in answers for fault in answer["faults"]]
    for kind in KINDS:
        of_kind = [fault["s"] for fault in faults if fault["kind"] == kind]
        taken_s = [seconds for seconds in of_kind if seconds is not None]
        table.add(kind, len(of_kind), middle(taken_s) if taken_s else None, max(taken_s, default=None))
    bad = [answer for answer in answers if problems(answer)]
    table.conditions["runs that do not hold"] = len(bad)
    table.holds = not bad
    return table


CASES = {"soak": Case(measure=soak, options={"faults": 1000, "per-run": 20, "seed": 0})}
