"""One run, from its plan to its exit status: signals, the first failure, and nothing left running."""

import contextlib
import os
import sys
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.errors import ProcessError
from launch.process import Launcher
from launch.start.prepare import Ready
from launch.watch.failure import explain, in_one_line
from launch.watch.stops import GRACE_S, Stops, read_report
from launch.watch.story import Story


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    status: int
    run_folder: str | None  # as rank 0 reported it
    why: str | None  # it failed or was stopped, in one line
    stopped: bool  # it was asked to end, by a signal; with status 0 it has saved
    checkpoint: int | None = None  # the newest step that it has saved, as rank 0 reported it


def run(ready: Ready, *, grace_s: float = GRACE_S) -> Ended:
    """Start it, wait, and clean up; one line on standard error tells why it failed, or that it was stopped and saved.

    A signal that asks for an end makes a program that has reported `saves` save and leave with 0, in `grace_s` seconds.
    """
    # Rank 0 may be on another host: then the folder must be one that both have, as the run folder's.
    parent = None if ready.order.network is None else Path.cwd()
    try:
        folder = tempfile.mkdtemp(prefix=".hvdlaunch-", dir=parent)
    except OSError as error:
        raise ProcessError(f"no folder can be made in {parent or tempfile.gettempdir()}: {error.strerror}") from error
    story = Story({slot.host for slot in ready.order.slots})
    with Stops(grace_s=grace_s) as stops:
        status, told = _watched(ready, Path(folder), story, stops)
    return _ended(ready, status, story, told, stops)


def _watched(ready: Ready, folder: Path, story: Story, stops: Stops) -> tuple[int | None, dict[str, str]]:
    """Its exit status, None if it had to be ended, and its report."""
    report = folder / "report.json"
    launcher = Launcher(ready.argv, env={**ready.environment, "HVDLAUNCH_REPORT": str(report)}, folder=folder)
    reader = threading.Thread(target=_copy, args=(launcher, story), daemon=True)
    reader.start()
    try:
        while (status := launcher.wait(0.1)) is None and not stops.overdue():
            stops.pass_on(launcher, report)
        told = read_report(report)
    finally:
        stops.restore()
        launcher.end()
    reader.join(1.0)
    return status, told


def _ended(ready: Ready, status: int | None, story: Story, told: Mapping[str, str], stops: Stops) -> Ended:
    if status == 0 and story.lost:
        status = 1  # Open MPI 5.0.11 ends with 0 when it has lost a host
    preempted = status == 0 and told.get("exit_reason") == "preempted"
    step = told.get("checkpoint", "")
    run_folder, checkpoint = told.get("run_folder"), int(step) if step.isdecimal() else None
    line = None
    if preempted and "said" not in told:
        job = ready.environment["HVDLAUNCH_JOB"]
        at = f" at step {step}" if step else ""
        line = f"stopped and saved{at}: HVDLAUNCH_JOB={job} before the same command goes on from there"
    elif status and (stops.by is None or stops.asked):
        line = explain(status, story, ready.order.slots, told)
    if line is not None:
        _show(f"hvdlaunch: {line}\n".encode())
    if stops.by is not None and status != 0:
        why = f"stopped by {stops.by.name}"
        return Ended(status=128 + stops.by, run_folder=run_folder, why=why, stopped=True, checkpoint=checkpoint)
    return Ended(
        status=1 if status is None else status,
        run_folder=run_folder,
        why=in_one_line(line or told.get("said", "")) if status or preempted else None,
        stopped=preempted or stops.by is not None,
        checkpoint=checkpoint,
    )


def _copy(launcher: Launcher, story: Story) -> None:
    while chunk := os.read(launcher.errors.fileno(), 65536):
        _show(story.hear(chunk))
    _show(story.rest())


def _show(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads us any more; the ranks go on
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()
