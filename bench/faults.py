"""How soon faults are noticed and the training goes on: the figures of docs/faults.md.

    python bench/faults.py --rounds 5
    python bench/faults.py --rounds 0 --clean-s 600       only a run without faults: are there false alarms?

Every round injects each fault into a run of 2 ranks, under `hvdlaunch run --restarts 1`: digits, efficientnet_tiny, a
checkpoint every 5 steps. Noticed: from the fault to the line that names the rank, for hangs beyond a step's limit.
On again: from there until a step is done. Left: processes 5 s after the end of hvdlaunch.
Aims: noticed within 3 s, for hangs within 2 s of the timeout; on again within 10 s; at most 5 steps lost; none left.
"""

import argparse
import contextlib
import os
import re
import signal
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from short_timeout import HANG_S
from watched import At, Watched

INTERVAL = 5  # steps between checkpoints
STRIKES_AT = 13  # step
LEFT_S = 5.0
ENDLESS = ["--epochs", "100000", "--checkpoint-every-steps", str(INTERVAL)]
PROGRAM = [str(Path(__file__).with_name("short_timeout.py"))]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """The cost of one fault."""

    noticed_s: float
    on_again_s: float | None  # None if the run was requested to leave
    lost: int | None  # steps that had to be repeated
    left: int  # processes alive 5 s after the end


Strike = Callable[[Watched], tuple[float, At]]


def injected(job: Watched) -> tuple[float, At]:
    """Wait until rank 1 begins the step, where it injects its own fault; the time, and where it is."""
    struck_s, at = job.until(lambda: job.reaches(STRIKES_AT, rank=1)), job.at(1)
    assert at is not None
    return struck_s, at


def sent(number: signal.Signals) -> Strike:
    """Send rank 1 a signal somewhere in the step, or in the next one."""

    def strike(job: Watched) -> tuple[float, At]:
        job.until(lambda: job.reaches(STRIKES_AT, rank=1))
        assert job.signal(number, rank=1)
        return injected(job)

    return strike


# How the fault strikes, its kind for HVDTRAIN_FAULT, and whether it is noticed only after the timeout.
FAULTS: dict[str, tuple[Strike, str, bool]] = {
    "kill -9 of a rank": (sent(signal.SIGKILL), "", False),
    "exception": (injected, "raise", False),
    "segmentation fault": (injected, "segv", False),
    "hang in Python": (injected, "sleep", True),
    "hang that holds the GIL": (injected, "gil", True),
    "SIGSTOP": (sent(signal.SIGSTOP), "", True),
}


def figures_of(folder: Path, strike: Strike, kind: str, *, hangs: bool) -> Figures:
    """One run that fails, goes on, and is then requested to leave."""
    fault = f"{kind}@rank1:step{STRIKES_AT}" if kind else ""
    with Watched(folder, ranks=2, options=["--restarts", "1"], program=PROGRAM, words=ENDLESS, fault=fault) as job:
        struck_s, at = strike(job)
        explained = job.until(
            lambda: job.newest_line("hvdlaunch: error: rank ") or job.newest_line("hvdlaunch: error: deadlock: ")
        )
        on_again_s = job.until(lambda: job.goes_on(1, after=at))
        job.process.terminate()
        assert job.process.wait(60) == 0
        restart = re.search(
            r"from step (\d+)$", job.until(lambda: job.newest_line("hvdlaunch: warning: restart 1 ")).text
        )
        assert restart
        return Figures(
            noticed_s=explained.at_s - struck_s - (HANG_S if hangs else 0.0),
            on_again_s=on_again_s - explained.at_s,
            lost=at.step - 1 - int(restart[1]),
            left=left_after(job),
        )


def preempted(folder: Path) -> Figures:
    """SIGTERM to hvdlaunch; noticed once it has ended."""
    with Watched(folder, ranks=2, program=PROGRAM, words=ENDLESS) as job:
        job.until(lambda: job.reaches(STRIKES_AT))
        struck_s = time.monotonic()
        job.process.terminate()
        assert job.process.wait(60) == 0
        ended_s = time.monotonic()
        left, reached, before = left_after(job), job.result()["steps"], job.at(0)
    assert before is not None
    with Watched(folder, ranks=2, program=PROGRAM, words=ENDLESS) as job:
        first = job.until(lambda: job.begins(0, after=before))
        return Figures(noticed_s=ended_s - struck_s, on_again_s=None, lost=reached + 1 - first.step, left=left)


def launcher_killed(folder: Path, name: str) -> Figures:
    """Kill -9 of hvdlaunch or mpirun; noticed once no process of the run is alive."""
    with Watched(folder, ranks=2, program=PROGRAM, words=ENDLESS) as job:
        job.until(lambda: job.reaches(STRIKES_AT))
        pids = [process.pid for process in job.left() if Path(process.cmdline()[0]).name == "mpirun"]
        os.kill(job.process.pid if name == "hvdlaunch" else pids[0], signal.SIGKILL)
        struck_s = time.monotonic()
        return Figures(noticed_s=job.gone() - struck_s, on_again_s=None, lost=None, left=left_after(job))


def left_after(job: Watched) -> int:
    with contextlib.suppress(TimeoutError):
        job.until(lambda: not job.left(), within_s=LEFT_S)
    return len(job.left())


def clean(seconds: float) -> None:
    """A run without faults, with the default time limits."""
    with tempfile.TemporaryDirectory() as folder, Watched(Path(folder), ranks=2, words=ENDLESS) as job:
        while time.monotonic() < job.started_s + seconds and job.process.poll() is None:
            time.sleep(0.5)
        alarms = [line.text for line in job.lines if line.text.startswith("hvdlaunch: error: rank ")]
        at = job.at(0)
        print(f"clean run of {seconds:g} s, {at.step if at else 0} steps: {len(alarms)} false alarms {alarms}")


def cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def show(name: str, rounds: list[Figures]) -> None:
    noticed = [figures.noticed_s for figures in rounds]
    on_again = [figures.on_again_s for figures in rounds if figures.on_again_s is not None]
    lost = [figures.lost for figures in rounds if figures.lost is not None]
    print(
        f"| {name} | {len(rounds)} | {cell(noticed)} | {cell(on_again)} | {max(lost) if lost else '-'} "
        f"| {max(figures.left for figures in rounds)} |",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--clean-s", type=float, default=0.0, help="then a run of so many seconds, for false alarms")
    chosen = arguments.parse_args()
    cases: dict[str, Callable[[Path], Figures]] = {
        name: lambda folder, fault=fault: figures_of(folder, fault[0], fault[1], hangs=fault[2])  # type: ignore[misc]
        for name, fault in FAULTS.items()
    }
    cases["SIGTERM to hvdlaunch"] = preempted
    cases["kill -9 of hvdlaunch"] = lambda folder: launcher_killed(folder, "hvdlaunch")
    cases["kill -9 of mpirun"] = lambda folder: launcher_killed(folder, "mpirun")
    measured: dict[str, list[Figures]] = {name: [] for name in cases}
    for _ in range(chosen.rounds):
        for name, case in cases.items():
            with tempfile.TemporaryDirectory() as folder:
                measured[name].append(case(Path(folder)))
    if chosen.rounds:
        print("| fault | n | noticed, s | on again, s | most steps lost | left after 5 s |\n|---|--:|---|---|--:|--:|")
        for name, rounds in measured.items():
            show(name, rounds)
    if chosen.clean_s:
        clean(chosen.clean_s)


if __name__ == "__main__":
    main()
