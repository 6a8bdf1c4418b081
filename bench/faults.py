"""How fast faults are noticed, and how soon the training goes on: the figures of docs/faults.md.

    python bench/faults.py --rounds 5
    python bench/faults.py --rounds 0 --clean-s 600       only a run that nothing happens to: does anything fire?

Every round strikes one run of 2 ranks with each fault, under `hvdlaunch run --restarts 1`: digits, efficientnet_tiny, a
checkpoint every 5 steps. Noticed: from the fault to the line that names the rank, for hangs beyond --hang-timeout-s.
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

from watched import At, Watched

INTERVAL = 5  # steps between checkpoints
STRIKES_AT = 13  # the step
HANG_S = 3.0  # --hang-timeout-s
LEFT_S = 5.0
ENDLESS = ["--epochs", "100000", "--checkpoint-every-steps", str(INTERVAL), "--hang-timeout-s", str(HANG_S)]


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What one fault has cost."""

    noticed_s: float
    on_again_s: float | None  # None where it was asked to leave
    lost: int | None  # steps that were taken twice
    left: int  # processes, 5 s after the end


Strike = Callable[[Watched], tuple[float, At]]


def injected(job: Watched) -> tuple[float, At]:
    """Rank 1 strikes itself when it begins the step."""
    struck_s, at = job.until(lambda: job.reaches(STRIKES_AT, rank=1)), job.at(1)
    assert at is not None
    return struck_s, at


def sent(number: signal.Signals) -> Strike:
    """A signal strikes rank 1 somewhere in the step, or in the next."""

    def strike(job: Watched) -> tuple[float, At]:
        job.until(lambda: job.reaches(STRIKES_AT, rank=1))
        assert job.signal(number, rank=1)
        return injected(job)

    return strike


# What is done, the injected fault, and whether it is noticed only when the timeout is over.
FAULTS: dict[str, tuple[Strike, str, bool]] = {
    "kill -9 of a rank": (sent(signal.SIGKILL), "", False),
    "exception": (injected, "raise", False),
    "segmentation fault": (injected, "segv", False),
    "hang in Python": (injected, "sleep", True),
    "hang that holds the GIL": (injected, "gil", True),
    "SIGSTOP": (sent(signal.SIGSTOP), "", True),
}


def struck(folder: Path, strike: Strike, kind: str, *, hangs: bool) -> Figures:
    """One run that fails, goes on, and is then asked to leave."""
    fault = f"{kind}@rank1:step{STRIKES_AT}" if kind else ""
    with Watched(folder, ranks=2, options=["--restarts", "1"], words=ENDLESS, fault=fault) as job:
        struck_s, at = strike(job)
        told = job.until(lambda: job.said("hvdlaunch: rank ") or job.said("hvdlaunch: all ranks "))
        on_again_s = job.until(lambda: job.goes_on(1, after=at))
        job.process.terminate()
        assert job.process.wait(60) == 0
        again = re.search(r"from step (\d+)$", job.until(lambda: job.said("hvdlaunch: restart 1 ")).text)
        assert again
        return Figures(
            noticed_s=told.at_s - struck_s - (HANG_S if hangs else 0.0),
            on_again_s=on_again_s - told.at_s,
            lost=at.step - 1 - int(again[1]),
            left=left_after(job),
        )


def asked_to_leave(folder: Path) -> Figures:
    """SIGTERM to hvdlaunch; noticed when it has ended."""
    with Watched(folder, ranks=2, words=ENDLESS) as job:
        job.until(lambda: job.reaches(STRIKES_AT))
        struck_s = time.monotonic()
        job.process.terminate()
        assert job.process.wait(60) == 0
        ended_s = time.monotonic()
        left, reached, before = left_after(job), job.result()["steps"], job.at(0)
    assert before is not None
    with Watched(folder, ranks=2, words=ENDLESS) as job:
        first = job.until(lambda: job.begins(0, after=before))
        return Figures(noticed_s=ended_s - struck_s, on_again_s=None, lost=reached + 1 - first.step, left=left)


def launcher_killed(folder: Path, name: str) -> Figures:
    """Kill -9 of hvdlaunch or mpirun; noticed when nothing of the run lives."""
    with Watched(folder, ranks=2, words=ENDLESS) as job:
        job.until(lambda: job.reaches(STRIKES_AT))
        pids = [one.pid for one in job.left() if Path(one.cmdline()[0]).name == "mpirun"]
        os.kill(job.process.pid if name == "hvdlaunch" else pids[0], signal.SIGKILL)
        struck_s = time.monotonic()
        return Figures(noticed_s=job.gone() - struck_s, on_again_s=None, lost=None, left=left_after(job))


def left_after(job: Watched) -> int:
    with contextlib.suppress(TimeoutError):
        job.until(lambda: not job.left(), within_s=LEFT_S)
    return len(job.left())


def clean(seconds: float) -> None:
    """A run that nothing happens to, with the default time limits."""
    words = [*ENDLESS[: ENDLESS.index("--hang-timeout-s")]]
    with tempfile.TemporaryDirectory() as folder, Watched(Path(folder), ranks=2, words=words) as job:
        while time.monotonic() < job.started_s + seconds and job.process.poll() is None:
            time.sleep(0.5)
        alarms = [line.text for line in job.lines if line.text.startswith("hvdlaunch: rank ")]
        at = job.at(0)
        print(f"clean run of {seconds:g} s, {at.step if at else 0} steps: {len(alarms)} false alarms {alarms}")


def cell(values: list[float]) -> str:
    if not values:
        return "-"
    return f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"


def show(name: str, rounds: list[Figures]) -> None:
    noticed, again = [one.noticed_s for one in rounds], [one.on_again_s for one in rounds if one.on_again_s is not None]
    lost = [one.lost for one in rounds if one.lost is not None]
    print(
        f"| {name} | {len(rounds)} | {cell(noticed)} | {cell(again)} | {max(lost) if lost else '-'} "
        f"| {max(one.left for one in rounds)} |",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--clean-s", type=float, default=0.0, help="then a run of so many seconds, for false alarms")
    chosen = arguments.parse_args()
    cases: dict[str, Callable[[Path], Figures]] = {
        name: lambda folder, one=one: struck(folder, one[0], one[1], hangs=one[2])  # type: ignore[misc]
        for name, one in FAULTS.items()
    }
    cases["SIGTERM to hvdlaunch"] = asked_to_leave
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
