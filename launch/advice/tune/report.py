"""A walk as a table for users and as JSON for programs: each remedy's gain, the total gain, and the command line."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from launch.advice.tune.remedies import Remedy
from launch.advice.tune.walk import MIN_GAIN, Configuration, Gain, RemedyTrial, Walk, environment_of, options_of
from launch.errors import harmless

TRAININGS = {True: "same", False: "another"}
HEADER = ("remedy", "for", "training", "times as fast", "range", "pairs", "result")


def to_markdown(walk: Walk, remarks: Sequence[str], commands: Mapping[str, str]) -> str:
    """Return the table, the conclusions, the `remarks`, and the commands; the last one keeps the training."""
    rows: list[tuple[str, ...]] = [HEADER, ("---", "---", "---", "--:", "--:", "--:", "---")]
    rows += [_row(trial.remedy, trial.gain, result_of(trial)) for trial in walk.trials]
    tried = {trial.remedy.name for trial in walk.trials}
    for remedy in walk.remedies:
        if remedy.name not in tried:
            skipped = f"skipped: {remedy.what_for} is too small a part"
            rows.append(_row(remedy, None, skipped if walk.cannot_help(remedy) else "not tried: no time left"))
    table = "\n".join(f"| {' | '.join(harmless(cell) for cell in row)} |" for row in rows)
    lines = [_baseline_line(walk), table, *map(harmless, _total_lines(walk)), *remarks]
    if "another" in commands:
        lines.append(f"Faster, but another training:\n\n    {commands['another']}")
    return "\n\n".join([*lines, f"    {commands['same']}"])


def _row(remedy: Remedy, gain: Gain | None, result: str) -> tuple[str, ...]:
    numbers = ("-", "-", "-") if gain is None else (f"{gain.times:.2f}", range_of(gain), str(gain.pairs))
    return (remedy.name, remedy.what_for, TRAININGS[remedy.same_training], *numbers, result)


def range_of(gain: Gain) -> str:
    """Format, for example: 1.41 to 1.63."""
    return f"{gain.low:.2f} to {gain.high:.2f}"


def result_of(trial: RemedyTrial) -> str:
    """Describe the result of a trial in a few words."""
    if trial.problem is not None:
        return f"failed: {trial.problem}"
    if trial.credited:
        return "credited"
    return f"not {MIN_GAIN:.0%} faster in each pair" if trial.is_finished else "not finished: no time left"


def _baseline_line(walk: Walk) -> str:
    """Return the speed of the unchanged program, and upper bounds of the gains from the shares of its step."""
    if walk.baseline is None:
        return "The program as it is was not measured."
    line = f"Baseline: {in_digits(walk.baseline.rate)} samples/s."
    for name, share in walk.shares.items():
        ceiling = f"{1 / (1 - share):.2f}" if share < 1 else "any number of"
        line += f" {share:.0%} of a step is {name}: without it at most {ceiling} times as fast."
    return line


def in_digits(rate: float) -> str:
    """Format a speed with four digits, for example 84,750."""
    return f"{float(f'{rate:.4g}'):,.10g}"


def _total_lines(walk: Walk) -> list[str]:
    """Return the credited totals, for the unchanged training and overall, and what had no time."""
    lines = []
    for name, configuration in (("At equal training", walk.same), ("With another training", walk.best)):
        if configuration and (configuration != walk.same or name == "At equal training"):
            total = walk.gain((), configuration)
            gain = f"{walk.credited_gain(configuration):.2f} times as fast, the product of the gains above"
            if total is not None:
                gain = f"{total.times:.2f} times as fast ({range_of(total)}, {total.pairs} pairs of starts)"
            lines.append(f"{name}: {', '.join(remedy.name for remedy in configuration)}: {gain}.")
    lines = lines or ["No remedy was credited: the program stays as it is."]
    if walk.baseline is not None and (left := len(walk.untried())):
        minutes = f"--minutes {walk.enough_s() / 60:.0f}"
        lines.append(f"Not tried to the end: {left} remedies. Run the same command with {minutes} or more.")
    return lines


def command(arguments: Sequence[str], program: Sequence[str], configuration: Configuration) -> str:
    """Return the command line for a configuration; `arguments` are the options of hvdlaunch run."""
    variables = [f"{name}={value}" for name, value in environment_of(configuration).items()]
    words = ["hvdlaunch", "run", *arguments, "--", *program, *options_of(configuration)]
    return shlex.join([*(["env", *variables] if variables else []), *words])


def to_json(walk: Walk, remarks: Sequence[str], commands: Mapping[str, str]) -> dict[str, Any]:
    """Return JSON for programs; `commands` are keyed by the training that they keep."""
    totals = {"same": walk.gain((), walk.same), "another": walk.gain((), walk.best) if walk.best != walk.same else None}
    return {
        "baseline_samples_per_s": None if walk.baseline is None else walk.baseline.rate,
        "shares": dict(walk.shares),
        "remedies": [
            {
                **asdict(trial.remedy),
                "gain": None if trial.gain is None else asdict(trial.gain),
                "credited": trial.credited,
                "result": result_of(trial),
            }
            for trial in walk.trials
        ],
        "skipped": [remedy.name for remedy in walk.remedies if walk.cannot_help(remedy)],
        "not_tried": [remedy.name for remedy in walk.untried()],
        "total": {name: None if total is None else asdict(total) for name, total in totals.items()},
        "commands": dict(commands),
        "remarks": list(remarks),
    }
