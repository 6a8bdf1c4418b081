"""A walk as Markdown for users and as JSON for programs: each step's gain, the total gain, and the command line."""

import shlex
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launch.errors import harmless
from launch.tune.compare import MIN_GAIN, Gain
from launch.tune.remedies import Remedy
from launch.tune.walk import Configuration, Trial, Walk, environment_of, options_of, untried

TRAININGS = {True: "same", False: "another"}


def to_markdown(walk: Walk, remarks: Sequence[str]) -> str:
    """Return the table and the conclusions; `remarks` are additional lines."""
    header = ["remedy", "for", "training", "gain", "interval", "pairs", "windows", "result"]
    rows = [_row(trial) for trial in walk.trials]
    rows += [_untried_row(remedy, walk) for remedy in _left(walk)]
    rows += _total_rows(walk)
    lines = [header, ["---"] * 3 + ["--:"] * 4 + ["---"], *rows]
    table = "\n".join(f"| {' | '.join(harmless(cell) for cell in line)} |" for line in lines)
    return "\n\n".join([*baseline_lines(walk), table, *total_lines(walk), *remarks])


def baseline_lines(walk: Walk) -> list[str]:
    """Return the speed of the unchanged program, and upper bounds of the gains from the shares of its step."""
    if not walk.baseline:
        return ["The program as it is was not measured."]
    lines = [f"Baseline: {in_digits(walk.baseline[0].rate)} samples/s."]
    for name, share in walk.shares.items():
        ceiling = f"{1 / (1 - share):.2f}" if share < 1 else "any number of"
        lines[0] += f" {share:.0%} of a step is {name}: without it at most {ceiling} times as fast."
    ruled_out = sorted({remedy.what_for for remedy in walk.remedies if walk.cannot_help(remedy)})
    if ruled_out:
        rest = {"computation": 1 - sum(walk.shares.values()), **walk.shares}
        bound = max(rest, key=lambda name: rest[name])
        lines[0] += f" Bound by {bound}: remedies for {' and '.join(ruled_out)} are skipped."
    return lines


def total_lines(walk: Walk) -> list[str]:
    """Return the credited totals, for the unchanged training and overall."""
    lines = []
    for name, configuration in _totals(walk):
        total, names = walk.total(configuration), ", ".join(remedy.name for remedy in configuration)
        gain = f"{walk.credited_gain(configuration):.2f} times as fast, the product of the gains above"
        lines.append(f"{name}: {names}: {gain if total is None else in_words(total)}.")
    lines = lines or ["No remedy was credited: the program stays as it is."]
    if walk.baseline and (left := len(list(untried(walk)))):
        lines.append(
            f"Not tried: {left} remedies. Run the same command with --minutes {walk.enough_s() / 60:.0f} or more."
        )
    return lines


def _totals(walk: Walk) -> list[tuple[str, Configuration]]:
    """Return the credited configurations, with the training that each keeps."""
    found = [("At equal training", walk.same), ("With another training", walk.best)]
    return [(name, those) for name, those in found if those and (name == found[0][0] or those != walk.same)]


def _total_rows(walk: Walk) -> list[list[str]]:
    rows = []
    for name, configuration in _totals(walk):
        total, training = walk.total(configuration), TRAININGS[configuration == walk.same]
        if total is not None:
            interval = f"{total.low:.2f} to {total.high:.2f}"
            rows.append(
                [f"**{name.lower()}**", "-", training, f"{total.times:.2f}", interval, str(total.pairs), "-", "-"]
            )
    return rows


def in_digits(rate: float) -> str:
    """Format a speed with four digits, for example 84,750."""
    return f"{float(f'{rate:.4g}'):,.10g}"


def in_words(gain: Gain) -> str:
    """Format, for example: 1.52 times as fast (1.41 to 1.63, 3 pairs of starts)."""
    return f"{gain.times:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f}, {gain.pairs} pairs of starts)"


def _row(trial: Trial) -> list[str]:
    remedy, gain = trial.remedy, trial.gain
    numbers = ["-", "-", "-", "-"]
    if gain is not None:
        high = f"{gain.high:.2f}" if gain.high < 100 else ">100"
        numbers = [f"{gain.times:.2f}", f"{gain.low:.2f} to {high}", str(gain.pairs), str(trial.windows)]
    return [remedy.name, remedy.what_for, TRAININGS[remedy.same_training], *numbers, result_of(trial)]


def result_of(trial: Trial) -> str:
    """Describe the result of a trial in a few words."""
    if trial.credited:
        return "credited"
    if trial.problem is not None:
        return f"failed: {trial.problem}"
    if trial.gain is None:
        return "not finished"
    if trial.gain.is_small:
        return f"slower, or less than {MIN_GAIN:.0%} faster"
    return "not sure"


def _left(walk: Walk) -> list[Remedy]:
    tried = {trial.remedy.name for trial in walk.trials}
    return [remedy for remedy in walk.remedies if remedy.name not in tried]


def _untried_row(remedy: Remedy, walk: Walk) -> list[str]:
    result = (
        f"skipped: {remedy.what_for} is too small a part" if walk.cannot_help(remedy) else "not tried: no time left"
    )
    return [remedy.name, remedy.what_for, TRAININGS[remedy.same_training], "-", "-", "-", "-", result]


def command(arguments: Sequence[str], program: Sequence[str], configuration: Configuration) -> str:
    """Return the command line for a configuration; `arguments` are the options of hvdlaunch run."""
    variables = [f"{name}={value}" for name, value in environment_of(configuration).items()]
    words = ["hvdlaunch", "run", *arguments, "--", *program, *options_of(configuration)]
    return shlex.join([*(["env", *variables] if variables else []), *words])


def to_json(walk: Walk, remarks: Sequence[str], commands: dict[str, str]) -> dict[str, Any]:
    """Return JSON for programs; `commands` are keyed by the training that they keep."""
    totals = {"same": walk.total(walk.same) if walk.same else None, "another": None}
    if walk.best not in ((), walk.same):
        totals["another"] = walk.total(walk.best)
    return {
        "tune": 1,
        "baseline_samples_per_s": walk.baseline[0].rate if walk.baseline else None,
        "shares": dict(walk.shares),
        "remedies": [
            {
                "name": trial.remedy.name,
                "what_for": trial.remedy.what_for,
                "same_training": trial.remedy.same_training,
                "gain": None if trial.gain is None else asdict(trial.gain),
                "windows": trial.windows,
                "credited": trial.credited,
                "result": result_of(trial),
            }
            for trial in walk.trials
        ],
        "skipped": [remedy.name for remedy in _left(walk) if walk.cannot_help(remedy)],
        "not_tried": [remedy.name for remedy in untried(walk)],
        "total": {name: None if total is None else asdict(total) for name, total in totals.items()},
        "commands": commands,
        "remarks": list(remarks),
    }
