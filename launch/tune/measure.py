"""Starts a program with a configuration, until its windows are sufficient."""

import shutil
import statistics
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from launch.errors import LaunchError, in_one_line
from launch.start.prepare import prepare
from launch.start.request import RunRequest
from launch.study.record import scratch
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
        job, windows = f"{self.job}-{number}", Windows()
        with scratch() as folder:
            watch = _Watch(folder / "windows.jsonl", until_s=began_s + limit_s)
            try:
                problem = self._run(wanted, watch, job)
                windows = read_windows(watch.file)
            except LaunchError as error:
                problem = in_one_line(error)
            except (OSError, ValueError) as error:
                problem = str(error)
        seconds = time.monotonic() - began_s
        if problem is None and len(windows.rates) < FEWEST:
            why = f"in {limit_s:.0f} s" if seconds >= limit_s else "before it ended"
            problem = f"{len(windows.rates)} windows {why}, not {FEWEST} after the warm-up"
        if problem is not None and (logs := Path(FOLDER) / job).is_dir():
            problem += f"; what its ranks wrote is in {logs}"
        return Start(
            rate=0.0 if problem else statistics.median(windows.rates),
            seconds=seconds,
            problem=problem,
            shares=windows.shares,
            epoch_samples=windows.epoch_samples,
        )

    def remove_logs(self, numbers: Iterable[int]) -> None:
        """Remove what the ranks of these starts wrote."""
        for number in numbers:
            shutil.rmtree(Path(FOLDER) / f"{self.job}-{number}", ignore_errors=True)

    def _run(self, wanted: Wanted, watch: "_Watch", job: str) -> str | None:
        """Return why the start failed; None if it did not, or was ended after its windows."""
        profile = self.catalogue.profile if wanted.profile else ()
        program = (*self.request.program, *self.catalogue.measure, *profile, *options_of(wanted.configuration))
        environment = {
            **self.environment,
            **environment_of(wanted.configuration),
            "HVDLAUNCH_WINDOWS": str(watch.file),
            "HVDLAUNCH_JOB": job,
        }
        prepared = prepare(replace(self.request, program=program), environment, Path.cwd())
        result = run(prepared, out=STDERR, until=watch)
        if result.run_folder is not None and Path(result.run_folder).name == job:  # its weights are not needed
            shutil.rmtree(result.run_folder, ignore_errors=True)
        if result.stopped:
            sys.exit(result.status)
        if watch.is_over or not result.status:
            return None
        return result.why or f"ended with status {result.status}"


class _Watch:
    """Decides whether a start has reached its goal; called repeatedly by `run`."""

    def __init__(self, file: Path, *, until_s: float) -> None:
        self.file, self._until_s, self._next_s = file, until_s, 0.0
        self.is_over = False

    def __call__(self) -> bool:
        now_s = time.monotonic()
        if now_s >= self._next_s:
            self._next_s = now_s + LOOK_S
            try:
                enough = read_windows(self.file).are_enough
            except ValueError:
                enough = True  # a malformed line, which is read once more after the end
            self.is_over = enough or now_s >= self._until_s
        return self.is_over
