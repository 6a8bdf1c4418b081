"""One run, from its plan to its exit status: signals, the first failure, and nothing left running."""

import contextlib
import os
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

from launch.errors import ProcessError
from launch.process import Launcher
from launch.start.render import PreparedRun
from launch.supervise.failure import explain, summary_line
from launch.supervise.mpirun_output import MpirunOutput
from launch.supervise.rank_logs import FOLDER, Logs
from launch.supervise.report import Report, read_report
from launch.supervise.stops import GRACE_S, Stops

ENDS = ("finished", "preempted")  # exit reasons of a status of 0


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended."""

    status: int
    run_folder: str | None  # as rank 0 reported it
    why: str | None  # why it failed or was stopped, in one line
    stopped: bool  # a signal asked for its end; with status 0 it has saved
    checkpoint: int | None = None  # the newest step that it has saved, as rank 0 reported it


def run(prepared: PreparedRun, *, grace_s: float = GRACE_S, out: int | None = None) -> RunResult:
    """Start the run, wait, and clean up; one line on standard error tells why it failed, or that it was stopped.

    A program that has reported `saves` has `grace_s` seconds to save and leave with 0 after a signal asks for its end.
    What it writes to standard output goes to the open file `out`, None: ours.
    """
    # Rank 0 may be on another host: then the folder must be one that both have, as the run folder's.
    parent = None if prepared.plan.network is None else Path.cwd()
    try:
        folder = tempfile.mkdtemp(prefix=".hvdlaunch-", dir=parent)
    except OSError as error:
        raise ProcessError(f"no folder can be made in {parent or tempfile.gettempdir()}: {error.strerror}") from error
    output = MpirunOutput({slot.host for slot in prepared.plan.slots})
    with Stops(grace_s=grace_s) as stops:
        status, report = _watch(prepared, Path(folder), output, stops, out)
    if status is not None:
        status = _believed(status, prepared, output, report)
    return _result(prepared, status, output, report, stops)


def _believed(status: int, prepared: PreparedRun, output: MpirunOutput, report: Report) -> int:
    """The status that the run has earned, where the launcher's tells something else.

    Open MPI 5.0.11 ends with 0 when it has lost a host, or all ranks, and with another when it has lost a newcomer.
    """
    if prepared.plan.elastic and report.run_folder is not None:
        return 0 if report.exit_reason in ENDS else status or 1
    return status or int(output.lost is not None)


def _watch(
    prepared: PreparedRun, folder: Path, output: MpirunOutput, stops: Stops, out: int | None
) -> tuple[int | None, Report]:
    """The launcher's exit status, None if we had to end it, and rank 0's report."""
    file = folder / "report.json"
    environment = {**prepared.environment, "HVDLAUNCH_REPORT": str(file)}
    launcher = Launcher(prepared.argv, env=environment, folder=folder, out=out)
    reader = threading.Thread(target=_copy, args=(launcher, output), daemon=True)
    reader.start()
    try:
        while (status := launcher.wait(0.1)) is None and not stops.overdue():
            stops.pass_on(launcher, file)
        report = read_report(file)
    finally:
        stops.restore()
        launcher.end()
    reader.join(1.0)
    return status, report


def _result(prepared: PreparedRun, status: int | None, output: MpirunOutput, report: Report, stops: Stops) -> RunResult:
    """How the run ended; the line that explains it is printed here, unless the program has done so."""
    preempted = status == 0 and report.exit_reason == "preempted"
    job = prepared.environment["HVDLAUNCH_JOB"]
    line: str | None = None
    why: str | None
    if preempted and report.explanation is None:
        at = "" if report.checkpoint is None else f" at step {report.checkpoint}"
        line = f"note: stopped and saved{at}. To resume, run the same command with HVDLAUNCH_JOB={job} before it."
    elif status and (stops.by is None or stops.saving):
        ssh = prepared.launcher.ssh
        logs = Logs(folder=Path.cwd() / FOLDER / job, python=prepared.launcher.python, ssh=ssh)
        line = explain(status, output, prepared.plan.slots, report, ssh, logs=logs)
    if line is not None:
        _show(f"hvdlaunch: {'error: ' if status else ''}{line}\n".encode())
    if stops.by is not None and status != 0:
        status, why = 128 + stops.by, f"stopped by {stops.by.name}"
    else:
        why = summary_line(line or report.explanation or "") if status or preempted else None
    return RunResult(
        status=1 if status is None else status,
        run_folder=report.run_folder,
        why=why,
        stopped=preempted or stops.by is not None,
        checkpoint=report.checkpoint,
    )


def _copy(launcher: Launcher, output: MpirunOutput) -> None:
    while chunk := os.read(launcher.errors.fileno(), 65536):
        _show(output.feed(chunk))
    _show(output.flush())


def _show(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads us any more; the ranks go on
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()
