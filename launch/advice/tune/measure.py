"""Starts a program with a configuration, until its windows are sufficient."""

import shutil
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from launch.advice.study.record import scratch
from launch.advice.tune.remedies import Catalogue
from launch.advice.tune.walk import Configuration, Start, Wanted, environment_of, options_of
from launch.advice.tune.windows import FEWEST, WindowReader, read_windows
from launch.errors import LaunchError, in_one_line
from launch.run.start.keepers import Keepers
from launch.run.start.prepare import prepare
from launch.run.start.request import RunRequest
from launch.run.supervise.rank_logs import FOLDER
from launch.run.supervise.run import RunResult, run

STDERR = 2  # for a start's output: standard output is for the table


@dataclass(frozen=True, kw_only=True)
class Measurer:
    """The settings of all starts of a program."""

    request: RunRequest  # its program is that of the command line
    catalogue: Catalogue
    environment: Mapping[str, str]
    job: str  # of all starts; a number is appended for each
    keepers: Keepers = field(default_factory=Keepers)

    def start(self, wanted: Wanted, *, number: int, limit_s: float) -> Start:
        """Start the program, and end it after its windows or `limit_s`. SystemExit after a signal.

        If the start fails, hangs or writes malformed windows, the result has a problem.
        """
        began_s = time.monotonic()
        job, windows = f"{self.job}-{number}", WindowReader()
        with scratch() as folder:
            file = folder / "windows.jsonl"
            try:
                problem = self._measure(wanted, job, file, until_s=began_s + limit_s)
                windows = read_windows(file)
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
            losses=windows.losses,
        )

    def remove_logs(self, numbers: Iterable[int]) -> None:
        """Remove what the ranks of these starts wrote."""
        for number in numbers:
            shutil.rmtree(Path(FOLDER) / f"{self.job}-{number}", ignore_errors=True)

    def _measure(self, wanted: Wanted, job: str, file: Path, *, until_s: float) -> str | None:
        """Return why the start failed; None if it did not, or was ended after its windows or its time."""
        options = (*self.catalogue.measure, *(self.catalogue.profile if wanted.profile else ()))
        result = self.run(
            wanted.configuration,
            job,
            options=options,
            variables={"HVDLAUNCH_WINDOWS": str(file)},
            until=lambda: time.monotonic() >= until_s or _is_measured(file),
        )
        if result.run_folder is not None and Path(result.run_folder).name == job:  # its weights are not needed
            shutil.rmtree(result.run_folder, ignore_errors=True)
        if result.stopped:
            sys.exit(result.status)
        return None if result.why is None else result.why or f"ended with status {result.status}"

    def run(
        self,
        configuration: Configuration,
        job: str,
        *,
        options: Sequence[str] = (),
        variables: Mapping[str, str],
        until: Callable[[], bool] = lambda: False,
    ) -> RunResult:
        """Run the program with a configuration, to its end or until `until` is true."""
        program = (*self.request.program, *options, *options_of(configuration))
        ours = {**variables, "HVDLAUNCH_JOB": job}
        environment = {**self.environment, **environment_of(configuration), **ours}
        request = replace(self.request, program=program, attempt=self.keepers.attempt)
        prepared = prepare(request, environment, Path.cwd())
        return run(prepared, out=STDERR, until=until, keepers=self.keepers)


def _is_measured(file: Path) -> bool:
    """Return whether the windows are enough, or malformed, which their reader finds again after the end."""
    try:
        return read_windows(file).are_enough
    except ValueError:
        return True
