"""Compares the accuracy of a changed training with the unchanged one, in full trainings with several seeds."""

import shutil
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from launch.advice.study import record
from launch.advice.tune.measure import Measurer
from launch.advice.tune.walk import Configuration, Walk
from launch.documents import Document, parse
from launch.errors import LaunchError, in_one_line
from launch.files import read_text
from launch.output import say
from launch.run.supervise.rank_logs import FOLDER

METRIC = "eval_accuracy"  # in result.json, in the run folder that the program reports


def cost_line(walk: Walk, seeds: int, epochs: float | None) -> str:
    """Predict the time of the full trainings, as far as the windows allow."""
    runs = f"{2 * seeds} whole trainings (--confirm-seeds {seeds})"
    if walk.baseline is None or walk.baseline.epoch_samples is None or epochs is None:
        return f"{runs}: their time is not known, since the program names no epochs or no samples of an epoch"
    whole_s = epochs * walk.baseline.epoch_samples / walk.baseline.rate
    times_s = [whole_s / walk.credited_gain(which) for which in (walk.same, walk.best)]
    return f"{runs}: about {seeds * sum(times_s) / 60:.0f} minutes for their steps, besides evaluations"


def confirm(measurer: Measurer, walk: Walk, seeds: int) -> list[tuple[float, float]]:
    """Train to the end with each seed, without and with what makes another training; return their accuracies.

    A seed counts only if both trainings have one. If the first training has none, no other is started. SystemExit if a
    signal ends a training.
    """
    pairs: list[tuple[float, float]] = []
    for seed in range(seeds):
        both = []
        for name, configuration in (("same", walk.same), ("another", walk.best)):
            say(f"seed {seed}, {name} training")
            both.append(_accuracy(measurer, configuration, name=name, seed=seed))
            if both == [None] and not pairs:  # nothing to compare with
                return pairs
        same, another = both
        if same is not None and another is not None:
            pairs.append((same, another))
    return pairs


def accuracy_line(pairs: Sequence[tuple[float, float]]) -> str:
    """Describe the mean difference of accuracies, and that of the lowest and the highest seed."""
    if not pairs:
        return f"Accuracy: not measured: no training took its seed and left {METRIC} in its result.json."
    same, another = (statistics.fmean(values) for values in zip(*pairs, strict=True))
    differences = [changed - unchanged for unchanged, changed in pairs]
    return (
        f"Accuracy: {same:.4f} with the same training, {another:.4f} with another one: {another - same:+.4f} "
        f"({min(differences):+.4f} to {max(differences):+.4f}), n = {len(pairs)}."
    )


def _accuracy(measurer: Measurer, configuration: Configuration, *, name: str, seed: int) -> float | None:
    job = f"{measurer.job}-{name}-seed{seed}"
    try:
        result = measurer.run(configuration, job, variables={"HVDLAUNCH_SEED": str(seed)})
    except LaunchError as error:
        say(f"error: {in_one_line(error)}")
        return None
    if result.stopped:
        sys.exit(result.status)
    if result.status or result.run_folder is None:
        return None
    shutil.rmtree(Path(FOLDER) / job, ignore_errors=True)
    folder = Path(result.run_folder)
    try:
        accuracy = Document(parse(read_text(folder / "result.json"))).number(METRIC, 0, 100)
    except (OSError, ValueError):
        return None
    used = record.read_json(folder / "config.json").get("seed")
    if used not in (None, seed):
        say(f"warning: the program takes seed {used} for every run: leave it out of its options")
        return None
    if folder.name == job:
        shutil.rmtree(folder, ignore_errors=True)
    return accuracy
