"""One run, from its plan to its exit status: signals, the first failure, and cleanup."""

import contextlib
import itertools
import os
import sys
import tempfile
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TextIO

from launch.errors import ProcessError
from launch.process import PIPE, LauncherProcess
from launch.run.start.keepers import Keepers
from launch.run.start.render import PreparedRun
from launch.run.supervise.after_checkpoint import AfterCheckpoint
from launch.run.supervise.failure import explain, summary_line
from launch.run.supervise.growth import Growth
from launch.run.supervise.hand_on import HandOn
from launch.run.supervise.launcher_output import LauncherOutput
from launch.run.supervise.progress import JobProgress
from launch.run.supervise.rank_logs import FOLDER, Logs, RankReport, read_report
from launch.run.supervise.screen import Screen, can_draw
from launch.run.supervise.spot.notices import Notices
from launch.run.supervise.stops import GRACE_S, Stops

FAILED = 1
SIGNALS = 128  # a status above it is that of a signal


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run."""

    status: int
    run_folder: str | None  # as reported by rank 0
    why: str | None  # why it failed or was stopped, in one line
    stopped: bool  # a signal requested its end; with status 0 it has saved
    checkpoint: int | None = None  # the newest saved step, as reported by rank 0
    snapshot: int | None = None  # the newest step in memory
    has_report: bool = True  # rank 0 has reported; a program without hvdtrain does not
    is_finished: bool = False  # as reported by rank 0
    is_shared: bool = True  # whether all hosts see the run folder, as reported by rank 0
    is_ranks_fault: bool = False  # a rank has failed, and its launcher and its host have not
    is_for_notice: bool = False  # stopped because a cloud ends a host, and not finished; other hosts may continue
    new_hosts: tuple[str, ...] = ()  # stopped because these may have ranks, too, and not finished
    host: str | None = None  # on which it failed
    is_host_lost: bool = False  # that host no longer answers


def run(
    prepared: PreparedRun,
    *,
    grace_s: float = GRACE_S,
    out: int | None = None,
    until: Callable[[], bool] = lambda: False,
    keepers: Keepers | None = None,
    growth: Growth | None = None,
) -> RunResult:
    """Start the run, wait, and clean up; one line on standard error explains a failure or a stop.

    A program that has reported `saves` gets `grace_s` seconds to save and exit with 0 after a stop signal. Its standard
    output goes to the open file `out`; None means ours. Once `until` returns True, the run is ended silently with
    status 1. `keepers` are for later starts. A program that saves is also stopped for the hosts of `growth`.
    """
    # Rank 0 may be on another host, so the folder must be shared by both, like the run folder.
    parent = None if prepared.plan.network is None else Path.cwd()
    try:
        folder = tempfile.mkdtemp(prefix=".hvdlaunch-", dir=parent)
    except OSError as error:
        where = parent or os.environ.get("TMPDIR") or "/tmp"  # noqa: S108
        raise ProcessError(f"no folder can be made in {where}: {error.strerror}") from error
    screen = Screen()
    output = LauncherOutput(prepared.launcher.messages, {slot.host for slot in prepared.plan.slots})
    with Stops(grace_s=grace_s) as stops, Notices(prepared, screen) as notices:
        status, report = _watch(
            prepared,
            Path(folder),
            output,
            stops,
            notices=notices,
            screen=screen,
            out=out,
            until=until,
            keepers=keepers,
            growth=growth,
        )
    if keepers is not None:
        keepers.let_import()
    if status is not None:
        status = _believed(status, output, report)
    hosts = growth.hosts if growth is not None and not notices.hosts else ()
    return _result(prepared, status, output, report, stops, notices=notices, screen=screen, new_hosts=hosts)


def _believed(status: int, output: LauncherOutput, report: RankReport) -> int:
    """Return the status of the run, corrected if the launcher's is wrong.

    Open MPI 5.0.11 exits with 0 after the loss of a host. srun exits with the highest status of all ranks, also of
    those that it has ended. A launcher that is killed after the program has finished changes nothing.
    """
    if status > SIGNALS and report.exit_reason == "finished" and output.rank is None:
        return 0
    if status and output.status:
        return output.status
    return status or int(output.lost is not None)


def _watch(
    prepared: PreparedRun,
    folder: Path,
    output: LauncherOutput,
    stops: Stops,
    *,
    notices: Notices,
    screen: Screen,
    out: int | None,
    until: Callable[[], bool],
    keepers: Keepers | None,
    growth: Growth | None,
) -> tuple[int | None, RankReport]:
    """Return the launcher's exit status, None if it had to be killed, and rank 0's report.

    A line on the terminal shows the job's progress; all output to the same terminal must pass through here.
    """
    file = folder / "report.json"
    environment = {**prepared.environment, "HVDLAUNCH_REPORT": str(file)}
    is_mpirun = prepared.launcher.name == "mpirun"
    is_drawn = can_draw()
    drawing: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if is_drawn:
        progress = JobProgress(prepared.plan.slots, _logs(prepared), file, apart=bool(prepared.plan.apart))
        drawing = screen.drawing(progress.line)
    marked = sys.stdout if out is None else sys.stderr  # where standard output of the ranks goes
    piped = PIPE if is_drawn and marked.isatty() else out
    hand_on, after_checkpoint = HandOn(prepared, file), AfterCheckpoint(prepared, file, screen)
    launcher = LauncherProcess(
        prepared.argv, env=environment, folder=folder, out=piped, receivers=prepared.launcher.receivers
    )
    readers = [threading.Thread(target=_copy_errors, args=(launcher, output, screen, marked), daemon=True)]
    if launcher.output is not None:
        readers.append(threading.Thread(target=_copy_output, args=(launcher.output, screen, marked), daemon=True))
    for reader in readers:
        reader.start()
    try:
        with drawing:
            while (status := launcher.wait(0.1)) is None and not stops.overdue() and not until():
                if notices.poll() or (growth is not None and growth.poll() and read_report(file).saves):
                    stops.stop_to_restart()
                stops.pass_on(launcher, file, hand_on.start)
                after_checkpoint.poll()
                if keepers is not None:
                    keepers.follow(prepared, file)
                if is_mpirun and launcher.is_alone():
                    status = FAILED
                    break
            after_checkpoint.finish(lambda: stops.overdue() or stops.again() or until())
        report = read_report(file)
        stops.take_late(saves=report.saves)
    finally:
        stops.restore()
        after_checkpoint.end()
        hand_on.end()
        launcher.end()
    for reader, stream in zip(readers, filter(None, (launcher.errors, launcher.output)), strict=True):
        reader.join(5.0)  # a process outside of the group may hold the pipe forever
        if not reader.is_alive():
            stream.close()
    return status, report


def _result(
    prepared: PreparedRun,
    status: int | None,
    output: LauncherOutput,
    report: RankReport,
    stops: Stops,
    *,
    notices: Notices,
    screen: Screen,
    new_hosts: tuple[str, ...],
) -> RunResult:
    """Return the result of the run, and print the explanation, unless the program has done so."""
    preempted = status == 0 and report.exit_reason == "preempted"
    is_to_restart = stops.is_to_restart and not (status == 0 and report.exit_reason == "finished")
    is_to_grow = is_to_restart and bool(new_hosts)
    resume = f"To resume, run the same command with HVDLAUNCH_JOB={prepared.environment['HVDLAUNCH_JOB']} before it."
    line: str | None = None
    host: str | None = None
    if preempted and report.explanation is None and not is_to_grow:
        at = "" if report.checkpoint is None else f" at step {report.checkpoint}"
        line = f"note: stopped and saved{at}. {resume}"
    elif status is None and stops.saving:
        step = report.checkpoint
        kept = "nothing is saved" if step is None else f"the checkpoint of step {step} is kept"
        line = f"note: stopped before the ranks could save: {kept}. {resume}"
    elif status and (stops.by is None or stops.saving):
        line, host = explain(
            status,
            output,
            prepared.plan.slots,
            report,
            prepared.launcher.ssh,
            logs=_logs(prepared),
            parameters=prepared.plan.mca,
        )
    if line is not None:
        screen.show(f"hvdlaunch: {'error: ' if status else ''}{line}\n".encode(errors="backslashreplace"))
    why = summary_line(line or report.explanation or "") if status or preempted else None
    if stops.by is not None and status != 0:
        status, why = 128 + stops.by, f"stopped by {stops.by.name}"
    is_for_notice = is_to_restart and not is_to_grow
    return RunResult(
        status=FAILED if status is None else status,
        run_folder=report.run_folder,
        why=notices.why() if is_for_notice else why,
        stopped=preempted or stops.by is not None,
        checkpoint=report.checkpoint,
        snapshot=report.snapshot,
        has_report=report != RankReport(),
        is_finished=report.exit_reason == "finished",
        is_shared=report.is_shared,
        is_ranks_fault=output.rank is not None and output.lost is None and output.gone is None,
        is_for_notice=is_for_notice and prepared.plan.local.isdisjoint(notices.hosts),
        new_hosts=new_hosts if is_to_grow else (),
        host=None if is_to_restart else host,
        is_host_lost=not is_to_restart and host is not None and host in (output.lost, output.gone),
    )


def _logs(prepared: PreparedRun) -> Logs:
    folder = Path.cwd() / FOLDER / prepared.environment["HVDLAUNCH_JOB"]
    return Logs(folder=folder, python=prepared.launcher.python, ssh=prepared.launcher.ssh)


def _copy_errors(launcher: LauncherProcess, output: LauncherOutput, screen: Screen, marked: TextIO) -> None:
    while chunk := os.read(launcher.errors.fileno(), 65536):
        for is_out, parts in itertools.groupby(output.feed(chunk), key=lambda part: part[0]):
            screen.show(b"".join(text for _, text in parts), marked if is_out else None)
    screen.show(output.flush())


def _copy_output(stream: IO[bytes], screen: Screen, to: TextIO) -> None:
    while chunk := os.read(stream.fileno(), 65536):
        screen.show(chunk, to)
