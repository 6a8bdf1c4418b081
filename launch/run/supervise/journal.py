"""The launcher's own log of a job, logs/JOB/hvdlaunch.log: what was started where, every line, and how it ended."""

import contextlib
import shlex
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.cores import core_list
from launch.errors import CommandError, LaunchError, harmless
from launch.files import held
from launch.output import log
from launch.run.start.environment import require_plain_job
from launch.run.start.render import PreparedRun
from launch.run.supervise.rank_logs import FOLDER
from launch.run.supervise.run import RunResult
from launch.run.supervise.traces.files import read_traces

NAME = "hvdlaunch.log"


@contextlib.contextmanager
def alone(environment: Mapping[str, str]) -> Iterator[None]:
    """Keep others from starting a job of this HVDLAUNCH_JOB; CommandError if one runs, whose processes it would end.

    A folder that takes no logs has no lock.
    """
    require_plain_job(environment)
    with contextlib.ExitStack() as lock:
        if job := environment.get("HVDLAUNCH_JOB"):
            try:
                lock.enter_context(held(Path.cwd() / FOLDER / job, "HVDLAUNCH_JOB="))
            except CommandError:
                raise
            except LaunchError:
                pass
        yield


def begin(prepared: PreparedRun) -> None:
    """Write the command, the place of each rank and the launcher's command, after what earlier attempts have left."""
    log.keep_in(Path.cwd() / FOLDER / prepared.environment["HVDLAUNCH_JOB"] / NAME)
    _add(shlex.join(["hvdlaunch", *sys.argv[1:]]))
    _add(f"attempt {prepared.plan.request.attempt.restart}")
    for slot in prepared.plan.slots:
        gpu = "no GPU" if slot.gpu is None else f"GPU {slot.gpu}"
        _add(f"rank {slot.rank}: {slot.host}, {gpu}, cores {core_list(slot.cores) or 'any'}")
    _add(f"starting: {shlex.join(prepared.argv)}")


def end(prepared: PreparedRun, result: RunResult) -> None:
    """Write the status of the run, and where each rank of hvdtrain was at its end."""
    _add(f"ended with status {result.status}{f': {result.why}' if result.why else ''}")
    if result.run_folder is not None:
        _add(f"run folder: {result.run_folder}")
        traces = read_traces(Path(result.run_folder) / "ranks", range(len(prepared.plan.slots)))
        for rank, trace in sorted(traces.items()):
            doing = "waited for others" if trace.waited else "read its data" if trace.read else "worked"
            _add(f"rank {rank}: {doing} {trace.at or 'at an unknown step'}")


def _add(line: str) -> None:
    log.add(f"{harmless(line)}\n".encode())
