"""Compares the accuracy of a changed training with the unchanged one, in full trainings with several seeds."""

import shutil
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from launch.documents import Document, parse
from launch.errors import LaunchError, in_one_line
from launch.files import read_text
from launch.output import say
from launch.start.prepare import prepare
from launch.supervise.run import run
from launch.tune.compare import t_quantile
from launch.tune.measure import STDERR, Measurer, remove_logs
from launch.tune.walk import Configuration, Walk, environment_of, options_of

METRIC = "eval_accuracy"  # in result.json, in the run folder that the program reports


@dataclass(frozen=True, kw_only=True)
class Accuracies:
    """Accuracies of full trainings with seeds 0, 1, ...: of the unchanged and of the changed training."""

    same: tuple[float | None, ...]
    another: tuple[float | None, ...]

    @property
    def line(self) -> str:
        """The difference with its 95 % interval, as far as measured."""
        pairs = [(a, b) for a, b in zip(self.same, self.another, strict=True) if a is not None and b is not None]
        if not pairs:
            return f"Accuracy: not measured: no training left {METRIC} in its result.json."
        differences = [b - a for a, b in pairs]
        means = [statistics.fmean(values) for values in zip(*pairs, strict=True)]
        middle = statistics.fmean(differences)
        margin = ""
        if len(pairs) > 1:
            half = t_quantile(0.05, len(pairs) - 1) * statistics.stdev(differences) / len(pairs) ** 0.5
            margin = f", 95 % interval {middle - half:+.4f} to {middle + half:+.4f}"
        return (
            f"Accuracy: {means[0]:.4f} with the same training, {means[1]:.4f} with another one: "
            f"{middle:+.4f}{margin}, n = {len(pairs)}."
        )


def cost_line(walk: Walk, seeds: int, epochs: float | None) -> str:
    """Predict the time of the full trainings, as far as the windows allow."""
    runs = f"{2 * seeds} whole trainings (--confirm-seeds {seeds})"
    samples = next((start.epoch_samples for start in walk.baseline), None)
    if samples is None or epochs is None:
        return f"{runs}: their time is not known, since the program names no epochs or no samples of an epoch"
    rate = walk.baseline[0].rate
    one_s = [epochs * samples / rate / walk.credited_gain(which) for which in (walk.same, walk.best)]
    return f"{runs}: about {seeds * sum(one_s) / 60:.0f} minutes for their steps, besides evaluations"


def confirm(measurer: Measurer, walk: Walk, seeds: int) -> Accuracies:
    """Train to the end with each seed, alternating between the best unchanged and the best changed training.

    SystemExit if a signal ends a training.
    """
    found: dict[str, list[float | None]] = {"same": [], "another": []}
    for seed in range(seeds):
        for name, configuration in (("same", walk.same), ("another", walk.best)):
            say(f"seed {seed}, {name} training")
            found[name].append(_accuracy(measurer, configuration, name=name, seed=seed))
    return Accuracies(same=tuple(found["same"]), another=tuple(found["another"]))


def _accuracy(measurer: Measurer, configuration: Configuration, *, name: str, seed: int) -> float | None:
    job = f"{measurer.job}-{name}-seed{seed}"
    environment: Mapping[str, str] = {
        **measurer.environment,
        **environment_of(configuration),
        "HVDLAUNCH_JOB": job,
        "HVDLAUNCH_SEED": str(seed),
    }
    program: Sequence[str] = (*measurer.request.program, *options_of(configuration))
    try:
        result = run(prepare(replace(measurer.request, program=tuple(program)), environment, Path.cwd()), out=STDERR)
    except LaunchError as error:
        say(f"error: {in_one_line(error)}")
        return None
    if result.stopped:
        sys.exit(result.status)
    if result.status or result.run_folder is None:
        return None
    remove_logs([job])
    folder = Path(result.run_folder)
    try:
        accuracy = Document(parse(read_text(folder / "result.json"))).number(METRIC, 0, 100)
    except (OSError, ValueError):
        return None
    if folder.name == job:
        shutil.rmtree(folder, ignore_errors=True)
    return accuracy
