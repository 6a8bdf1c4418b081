"""A walk, from the check of the hosts to the resulting command line."""

import shlex
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from launch.documents import Document
from launch.errors import CommandError, LaunchError, ProcessError, harmless
from launch.files import held
from launch.output import say
from launch.start.command import in_apptainer
from launch.start.request import RunRequest
from launch.study import check as hosts
from launch.study import record
from launch.tune import confirm, report
from launch.tune.measure import Measurer
from launch.tune.remedies import Catalogue, ask_program
from launch.tune.walk import Start, Walk, Wanted
from launch.tune.windows import LEAST, MOST, shares_of

MAX_MINUTES = 10_000.0


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The options of a tuning."""

    request: RunRequest
    arguments: tuple[str, ...]  # of hvdlaunch run, as in the resulting command
    minutes: float
    confirm_seeds: int
    name: str | None


def tune(tuning: Tuning, environment: Mapping[str, str]) -> int:
    """Measure the remedies that the program proposes, print their gains, and end with a command line.

    Return 0 at the end of the walk or of its time; 128 + signal after a signal. LaunchError for bad input, and if the
    unchanged program cannot be measured.
    """
    if not 0 < tuning.minutes <= MAX_MINUTES:
        raise CommandError(f"--minutes {tuning.minutes:g}: pass minutes above 0, up to {MAX_MINUTES:g}")
    if not 0 <= tuning.confirm_seeds <= 1000:
        raise CommandError(f"--confirm-seeds {tuning.confirm_seeds}: pass a number of trainings, from 0 to 1000")
    request = tuning.request
    image = request.apptainer
    catalogue = ask_program(request.program if image is None else in_apptainer(request.program, image), environment)
    settings = {
        "program": list(request.program),
        "np": request.np,
        "hosts": [f"{host.name}:{host.slots}" for host in request.hosts or ()],
        **record.of_request(request),
        "measure": list(catalogue.measure),
        "remedies": [asdict(remedy) for remedy in catalogue.remedies],
    }
    folder = record.folder_of("tunes", tuning.name, "tune", settings)
    measurer = Measurer(request=request, catalogue=catalogue, environment=environment, job=folder.name)
    with held(folder):
        starts = Starts(folder / "tune.json", settings, measurer)
        return _tune(tuning, environment, starts, catalogue)


def _tune(tuning: Tuning, environment: Mapping[str, str], starts: "Starts", catalogue: Catalogue) -> int:
    remarks = _check_hosts(tuning.request, environment)
    starts.write()  # detect now if the file cannot be written
    walk = Walk(remedies=catalogue.remedies, budget_s=60 * tuning.minutes, start=starts.start)
    status = 0
    try:
        _walk(walk, tuning.minutes)
        if tuning.confirm_seeds and walk.best != walk.same:
            say(confirm.cost_line(walk, tuning.confirm_seeds, catalogue.epochs))
            remarks.append(confirm.accuracy_line(confirm.confirm(starts.measurer, walk, tuning.confirm_seeds)))
        elif walk.best != walk.same:
            remarks.append("The accuracy of another training was not measured: add --confirm-seeds 3.")
    except (SystemExit, KeyboardInterrupt) as stop:  # between two starts
        status = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 128 + signal.SIGINT
        say("stopped: what follows is the best so far. Run the same command again to resume.")
    starts.remove_logs(walk)
    program = tuning.request.program
    commands = {"same": report.command(tuning.arguments, program, walk.same)}
    lines = list(remarks)
    if walk.best != walk.same:
        commands["another"] = report.command(tuning.arguments, program, walk.best)
        lines.append(f"Faster, but another training:\n\n    {commands['another']}")
    starts.write(result=report.to_json(walk, remarks, commands))
    say(f"{shlex.quote(str(starts.file))} has the starts and the result")
    print(f"{report.to_markdown(walk, lines)}\n\n    {commands['same']}", flush=True)
    return status


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
        say(f"start {number}: {wanted.what}")
        start = self.measurer.start(wanted, number=number, limit_s=limit_s)
        self._made.append((names, wanted.profile, start))
        self.write()
        result = start.problem or f"{report.in_digits(start.rate)} samples/s"
        say(f"  {harmless(result)}, {start.seconds:.0f} s")
        return start

    def remove_logs(self, walk: Walk) -> None:
        """Remove the logs of starts that ended well, but for the newest of each resulting command."""
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
    )
    return [str(name) for name in line.list("remedies")], line.values.get("profile") is True, start
