"""Starts a program with a configuration, until its windows are sufficient."""

import contextlib
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import LaunchError, in_one_line
from launch.start.prepare import prepare
from launch.start.request import RunRequest
from launch.supervise.rank_logs import FOLDER
from launch.supervise.run import run
from launch.tune.remedies import Catalogue
from launch.tune.walk import Start, Wanted, environment_of, options_of
from launch.tune.windows import FEWEST, Windows, read_windows

STDERR = 2  # for a start's output: standard output is for the table
LOOK_S = 0.2  # between checks of the windows


@dataclass(frozen=True, kw_only=True)
class Measurer:
    """The settings of all starts of a program."""

    request: RunRequest  # its program is that of the command line
    catalogue: Catalogue
    environment: Mapping[str, str]
    job: str  # of all starts; a number is appended for each

    def start(self, wanted: Wanted, *, number: int, limit_s: float) -> Start:
        """Start the program, and end it after its windows or `limit_s`. SystemExit after a signal.

        If the start fails, hangs or writes malformed windows, the result has a problem.
        """
        began_s = time.monotonic()
        with _folder() as folder:
            file = folder / "windows.jsonl"
            watch = _Watch(file, until_s=began_s + limit_s)
            try:
                problem = self._run(wanted, file, watch, number=number)
                windows = read_windows(file)
            except LaunchError as error:
                windows, problem = Windows(), in_one_line(error)
            except (ValueError, OSError) as error:
                windows, problem = Windows(), str(error)
        seconds = time.monotonic() - began_s
        if problem is None and len(windows.rates) < FEWEST:
            why = f"in {limit_s:.0f} s" if watch.is_late else "before it ended"
            problem = f"{len(windows.rates)} windows {why}, not {FEWEST} after the warm-up"
        logs = logs_of(self._job(number))
        if problem is not None and logs.is_dir():
            problem += f"; what its ranks wrote is in {logs}"
        return Start(
            rates=() if problem else windows.rates,
            seconds=seconds,
            problem=problem,
            shares=windows.shares,
            epoch_samples=windows.epoch_samples,
        )

    def remove_logs(self, numbers: Iterable[int]) -> None:
        """Remove what the ranks of these starts wrote."""
        remove_logs(map(self._job, numbers))

    def _job(self, number: int) -> str:
        return f"{self.job}-{number}"

    def _run(self, wanted: Wanted, file: Path, watch: "_Watch", *, number: int) -> str | None:
        """Return why the start failed; None if it did not, or was ended after its windows."""
        own = self.catalogue.profile if wanted.profile else ()
        program = (*self.request.program, *self.catalogue.measure, *own, *options_of(wanted.configuration))
        job = self._job(number)
        environment = {
            **self.environment,
            **environment_of(wanted.configuration),
            "HVDLAUNCH_WINDOWS": str(file),
            "HVDLAUNCH_JOB": job,
        }
        prepared = prepare(replace(self.request, program=program), environment, Path.cwd())
        result = run(prepared, out=STDERR, until=watch)
        if result.run_folder is not None and Path(result.run_folder).name == job:  # its weights are not needed
            shutil.rmtree(result.run_folder, ignore_errors=True)
        if result.stopped:
            sys.exit(result.status)
        if watch.is_over or not result.status:
            return watch.problem
        return result.why or f"ended with status {result.status}"


def logs_of(job: str) -> Path:
    """The folder of what the ranks of a start wrote, as seen from the one from which runs are started."""
    return Path(FOLDER) / job


def remove_logs(jobs: Iterable[str]) -> None:
    """Remove their folders."""
    for job in jobs:
        shutil.rmtree(logs_of(job), ignore_errors=True)


class _Watch:
    """Decides whether a start has reached its goal; called repeatedly by `run`."""

    def __init__(self, file: Path, *, until_s: float) -> None:
        self._file, self._until_s, self._next_s = file, until_s, 0.0
        self.is_over = self.is_late = False
        self.problem: str | None = None

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            self.is_late = now_s >= self._until_s
            try:
                enough = read_windows(self._file).are_enough
            except (ValueError, OSError) as error:
                enough, self.problem = True, str(error)
            self.is_over = enough or self.is_late
        return self.is_over


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """Create a folder visible to all hosts, like the one from which a run is started."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=".hvdlaunch-", dir=Path.cwd()))
    except OSError as error:
        raise LaunchError(
            f"no folder can be made in {Path.cwd()} for windows: {os.strerror(error.errno or 0)}"
        ) from error
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
