"""The metrics of a test, as tables and pictures show them; `best` of a task is the one by which runs are compared."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from hvdtrain.insight.compare.runs import RecordedRun
from hvdtrain.insight.compare.texts import format_digits


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric: its names, its unit and its digits."""

    name: str  # the task's name, for example iou
    title: str  # of a column
    column: str  # in a CSV
    number_format: Callable[[float], str]
    scale: float = 1.0  # from the task's value to the one that is shown
    unit: str = ""  # of a difference
    higher_is_better: bool = True

    @property
    def axis(self) -> str:
        """The label of an axis."""
        return f"test {self.name}{', %' if self.scale == 100 else ''}"


ACCURACY = Metric(
    name="accuracy",
    title="accuracy %",
    column="accuracy_percent",
    number_format="{:.2f}".format,
    scale=100.0,
    unit=" points",
)
LOSS = "loss"
_KNOWN = {
    "accuracy": ACCURACY,
    "f1": Metric(name="f1", title="F1", column="eval_f1", number_format="{:.3f}".format),
    LOSS: Metric(name=LOSS, title="loss", column="eval_loss", number_format="{:.4f}".format, higher_is_better=False),
}


def metric(name: str) -> Metric:
    """Return the metric of this name."""
    return _KNOWN.get(name) or Metric(name=name, title=name, column=f"eval_{name}", number_format=format_digits)


def best_metric(runs: Iterable[RecordedRun]) -> Metric:
    """Return the metric by which the first run that names one selects its best weights; accuracy if none does."""
    run = next((run for run in runs if run.best), None)
    if run is None or run.best is None:
        return ACCURACY
    found = metric(run.best)
    return replace(found, higher_is_better=bool(run.result.get("higher_is_better", found.higher_is_better)))


def metrics_of(runs: Iterable[RecordedRun]) -> list[Metric]:
    """Return the metrics of all runs: each run's best one first, the loss last unless it is the best one."""
    runs = list(runs)
    bests = dict.fromkeys(run.best for run in runs if run.best) or {ACCURACY.name: None}
    tested = {name.removeprefix("eval_") for run in runs for name in run.result if name.startswith("eval_")}
    return [metric(name) for name in dict.fromkeys([*bests, *sorted(tested - {LOSS}), LOSS])]
