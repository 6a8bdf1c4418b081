"""A walk, from the check of the hosts to the resulting command line."""

import shlex
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.advice.study import check as hosts
from launch.advice.study import record
from launch.advice.tune import confirm, report
from launch.advice.tune.measure import Measurer
from launch.advice.tune.remedies import ask_program
from launch.advice.tune.walk import Start, Walk, Wanted
from launch.advice.tune.windows import LEAST, MOST, losses_of, shares_of
from launch.documents import Document
from launch.errors import CommandError, LaunchError, ProcessError, harmless
from launch.output import say
from launch.run.start.decide import in_apptainer
from launch.run.start.keepers import Keepers
from launch.run.start.request import RunRequest

MAX_MINUTES = 10_000.0


def tune(
    request: RunRequest,
    environment: Mapping[str, str],
    *,
    arguments: Sequence[str],
    minutes: float,
    confirm_seeds: int,
    name: str | None,
) -> int:
    """Measure the remedies that the program proposes, print their gains, and end with a command line.

    `arguments` are those of hvdlaunch run in that command. Return 0 at the end of the walk or of its time; 128 + signal
    after a signal. LaunchError for bad input, and if the unchanged program cannot be measured.
    """
    if not 0 < minutes <= MAX_MINUTES:
        raise CommandError(f"--minutes {minutes:g}: pass minutes above 0, up to {MAX_MINUTES:g}")
    if not 0 <= confirm_seeds <= 1000:
        raise CommandError(f"--confirm-seeds {confirm_seeds}: pass a number of trainings, from 0 to 1000")
    program, image = request.program, request.apptainer
    catalogue = ask_program(program if image is None else in_apptainer(program, image), environment)
    settings = {
        "program": list(program),
        "np": request.np,
        "hosts": [f"{host.name}:{host.slots}" for host in request.hosts or ()],
        **record.of_request(request, environment),
        "measure": list(catalogue.measure),
        "remedies": [asdict(remedy) for remedy in catalogue.remedies],
    }
    with record.held_folder("tunes", name, "tune", settings) as folder, Keepers(after_run=True) as keepers:
        measurer = Measurer(
            request=request, catalogue=catalogue, environment=environment, job=folder.name, keepers=keepers
        )
        starts = Starts(folder / "tune.json", settings, measurer)
        remarks = _check_hosts(request, environment)
        starts.write()  # detect now if the file cannot be written
        walk = Walk(remedies=catalogue.remedies, budget_s=60 * minutes, start=starts.start)
        status = 0
        try:
            _walk(walk, minutes)
            remarks += _accuracy_remarks(walk, measurer, confirm_seeds)
        except (SystemExit, KeyboardInterrupt) as stop:  # between two starts
            status = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 128 + signal.SIGINT
            say("stopped: what follows is the best so far. Run the same command again to resume.")
        starts.remove_logs(walk)
        best = {"same": walk.same, **({"another": walk.best} if walk.best != walk.same else {})}
        commands = {which: report.command(arguments, program, configuration) for which, configuration in best.items()}
        starts.write(result=report.to_json(walk, remarks, commands))
        say(f"{shlex.quote(str(starts.file))} has the starts and the result")
        print(report.to_markdown(walk, remarks, commands), flush=True)
    return status


def _accuracy_remarks(walk: Walk, measurer: Measurer, seeds: int) -> list[str]:
    if walk.best == walk.same:
        return []
    if not seeds:
        return ["The accuracy of another training was not measured: add --confirm-seeds 3."]
    say(confirm.cost_line(walk, seeds, measurer.catalogue.epochs))
    return [confirm.accuracy_line(confirm.confirm(measurer, walk, seeds))]


def _check_hosts(request: RunRequest, environment: Mapping[str, str]) -> list[str]:
    """Return the warnings of `hvdlaunch check` as lines; LaunchError for its errors, before anything starts."""
    checked = hosts.check(request, environment, Path.cwd(), runs_dir=Path("runs"), data_dir=Path("data"))
    lines = [harmless(str(finding)) for finding in checked.findings if finding.severity != "note"]
    for line in lines:
        say(line)
    if checked.status:
        raise LaunchError("the hosts have errors, see above. Fix them: hvdlaunch check shows all of them.")
    return [f"Hosts: {line}" for line in lines] or ["Hosts: hvdlaunch check finds nothing wrong."]


def _walk(walk: Walk, minutes: float) -> None:
    """Make all starts; LaunchError if the unchanged program yields no windows."""
    try:
        walk.run()
    except ValueError as error:
        if walk.spent_s >= walk.budget_s:
            raise CommandError(f"--minutes {minutes:g}: too few for the program as it is: {error}") from error
        raise ProcessError(f"the program as it is cannot be measured: {error}") from error


class Starts:
    """The starts of a walk: those of the file first, each once, then new ones, which are added to it."""

    def __init__(self, file: Path, settings: Mapping[str, Any], measurer: Measurer) -> None:
        """Read the file; CommandError if it is invalid or from another walk."""
        self.file, self.measurer, self._settings = file, measurer, settings
        self._made = record.read(file, settings, "starts", _recorded)
        self._unused = list(self._made)

    def start(self, wanted: Wanted, limit_s: float) -> Start:
        """Return the next start of this kind in the file, else make one; a failed baseline is made again."""
        names = [remedy.name for remedy in wanted.configuration]
        for kept in self._unused:
            if kept[:2] == (names, wanted.profile) and (names or kept[2].problem is None):
                self._unused.remove(kept)
                return kept[2]
        number = len(self._made) + 1
        say(f"start {number}: {harmless(wanted.what)}")
        start = self.measurer.start(wanted, number=number, limit_s=limit_s)
        self._made.append((names, wanted.profile, start))
        self.write()
        result = start.problem or f"{report.in_digits(start.rate)} samples/s"
        say(f"  {harmless(result)}, {start.seconds:.0f} s")
        return start

    def remove_logs(self, walk: Walk) -> None:
        """Remove the logs of starts that ended well, except for the newest of each resulting command."""
        well = {number: names for number, (names, _, start) in enumerate(self._made, start=1) if start.problem is None}
        newest = {tuple(names): number for number, names in well.items()}
        kept = {newest.get(tuple(remedy.name for remedy in best)) for best in (walk.same, walk.best)}
        self.measurer.remove_logs(well.keys() - kept)

    def write(self, **result: Any) -> None:
        """Write the file; LaunchError if that fails."""
        starts = [{"remedies": names, "profile": profile, **asdict(start)} for names, profile, start in self._made]
        record.write(self.file, {**self._settings, "starts": starts, **result})


def _recorded(line: Document) -> tuple[list[str], bool, Start]:
    problem = line.optional_text("problem")
    start = Start(
        rate=line.number("rate", LEAST / MOST if problem is None else 0, MOST / LEAST),
        seconds=line.number("seconds", 0, MOST),
        problem=problem,
        shares=shares_of(line),
        epoch_samples=line.optional_number("epoch_samples", LEAST, MOST),
        losses=losses_of(line),
    )
    return [str(name) for name in line.list("remedies")], line.values.get("profile") is True, start
