"""A walk, from the check of the hosts to the resulting command line."""

import hashlib
import json
import re
import shlex
import signal
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import CommandError, LaunchError, ProcessError, harmless
from launch.files import held, write_whole
from launch.output import say
from launch.start.command import in_apptainer
from launch.start.request import RunRequest
from launch.study import check as hosts
from launch.tune import confirm, picture, report
from launch.tune.measure import Measurer
from launch.tune.remedies import Catalogue, ask_program
from launch.tune.state import State, settings
from launch.tune.walk import Start, Walk, Wanted

FOLDER = Path("tunes")
LEAST_LIMIT_S, LIMIT_TIMES = 60.0, 4.0  # of a start: this multiple of a start of the unchanged program
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
    require_sensible(tuning)
    program, image = tuning.request.program, tuning.request.apptainer
    catalogue = ask_program(program if image is None else in_apptainer(program, image), environment)
    of_walk = settings(tuning.request, catalogue)
    name = tuning.name or f"tune-{hashlib.sha256(json.dumps(of_walk).encode()).hexdigest()[:8]}"
    with held(FOLDER / name):
        return _tune(tuning, environment, catalogue, of_walk, name)


def _tune(
    tuning: Tuning, environment: Mapping[str, str], catalogue: Catalogue, of_walk: Mapping[str, Any], name: str
) -> int:
    folder = FOLDER / name
    state = State(folder / "tune.json", of_walk)
    remarks = _check_hosts(tuning.request, environment)
    state.write()  # detect now if the file cannot be written
    measurer = Measurer(request=tuning.request, catalogue=catalogue, environment=environment, job=name)
    walk = Walk(remedies=catalogue.remedies, budget_s=60 * tuning.minutes)
    status = 0
    try:
        _walk(walk, measurer, state, tuning.minutes)
        if tuning.confirm_seeds and walk.best != walk.same:
            say(confirm.cost_line(walk, tuning.confirm_seeds, catalogue.epochs))
            remarks.append(confirm.confirm(measurer, walk, tuning.confirm_seeds).line)
        elif walk.best != walk.same:
            remarks.append("The accuracy of another training was not measured: add --confirm-seeds 3.")
    except (SystemExit, KeyboardInterrupt) as stop:  # between two starts
        status = stop.code if isinstance(stop, SystemExit) and isinstance(stop.code, int) else 128 + signal.SIGINT
        say("stopped: what follows is the best so far. Run the same command again to resume.")
    measurer.remove_logs(state.ended_well(besides=(walk.same, walk.best)))
    _print(walk, tuning, folder, remarks)
    return status


def require_sensible(tuning: Tuning) -> None:
    """Raise CommandError for invalid numbers and names."""
    if not 0 < tuning.minutes <= MAX_MINUTES:
        raise CommandError(f"--minutes {tuning.minutes:g}: pass minutes above 0, up to {MAX_MINUTES:g}")
    if not 0 <= tuning.confirm_seeds <= 1000:
        raise CommandError(f"--confirm-seeds {tuning.confirm_seeds}: pass a number of trainings, from 0 to 1000")
    if tuning.name is not None and re.fullmatch(r"[A-Za-z0-9][\w.-]*", tuning.name, re.ASCII) is None:
        raise CommandError(f"--name {tuning.name!r}: pass one folder's name, of letters, digits, '.', '_' and '-'")


def _check_hosts(request: RunRequest, environment: Mapping[str, str]) -> list[str]:
    """Return the warnings of `hvdlaunch check` as lines; LaunchError for its errors, before anything starts."""
    checked = hosts.check(request, environment, Path.cwd(), runs_dir=Path("runs"), data_dir=Path("data"))
    lines = [harmless(str(finding)) for finding in checked.findings if finding.severity != "note"]
    for line in lines:
        say(line)
    if checked.status:
        raise LaunchError("the hosts have errors, see above. Fix them: hvdlaunch check shows all of them.")
    return [f"Hosts: {line}" for line in lines] or ["Hosts: hvdlaunch check finds nothing wrong."]


def _walk(walk: Walk, measurer: Measurer, state: State, minutes: float) -> None:
    """Make the starts that are needed and not recorded; LaunchError if the unchanged program yields no windows."""
    steps = walk.steps()
    try:
        wanted = next(steps)
        while True:
            start = state.take(wanted) or _measured(walk, wanted, measurer, state)
            if walk.baseline_is_late(start):
                raise CommandError(
                    f"--minutes {minutes:g}: too few for the program as it is, {wanted.what}: {start.problem}"
                )
            wanted = steps.send(start)
    except StopIteration:
        return
    except ValueError as error:
        raise ProcessError(f"the program as it is cannot be measured: {error}") from error


def _measured(walk: Walk, wanted: Wanted, measurer: Measurer, state: State) -> Start:
    left_s = max(1.0, walk.budget_s - walk.spent_s)
    say(f"{wanted.what} (start {len(state) + 1}, {left_s / 60:.1f} minutes left)")
    limit_s = left_s
    if walk.baseline:
        usual_s = statistics.median(start.seconds for start in walk.baseline)
        limit_s = min(max(LEAST_LIMIT_S, LIMIT_TIMES * usual_s), max(left_s, LEAST_LIMIT_S))
    start = measurer.start(wanted, number=len(state) + 1, limit_s=limit_s)
    state.add(wanted, start)
    said = start.problem or f"{report.in_digits(start.rate)} samples/s, {len(start.rates)} windows"
    say(f"  {harmless(said)}, {start.seconds:.0f} s")
    return start


def _print(walk: Walk, tuning: Tuning, folder: Path, remarks: Sequence[str]) -> None:
    """Print the table and the command line; write both and the picture to files."""
    program = tuning.request.program
    commands = {"same": report.command(tuning.arguments, program, walk.same)}
    lines = list(remarks)
    if walk.best != walk.same:
        commands["another"] = report.command(tuning.arguments, program, walk.best)
        lines.append(f"Faster, but another training:\n\n    {commands['another']}")
    text = f"{report.to_markdown(walk, lines)}\n\n    {commands['same']}\n"
    document = json.dumps(report.to_json(walk, remarks, commands), indent=1)
    for name, content in (("tune.md", text), ("result.json", f"{document}\n")):
        try:
            write_whole(folder / name, content)
        except OSError as error:
            raise LaunchError(f"{folder / name} cannot be written: {error.strerror}") from error
    picture.draw(walk, folder / "tune.svg")
    say(f"{shlex.quote(str(folder))} has tune.md, tune.svg and result.json")
    print(text, end="", flush=True)
