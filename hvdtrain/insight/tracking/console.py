"""Console output of a run, and what it counts for the sign of life; shown by rank 0."""

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from hvdtrain.core.finite import Skipped
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Reports
from hvdtrain.settings.safety import life, output
from hvdtrain.settings.safety.exits import Severity, print_message

Item = TypeVar("Item")
_READINGS = 60  # over which a speed is measured
_SAMPLES = 8  # shown of a step with a spike; metrics.jsonl has all


class ItemCount(life.Activity):
    """Items that are taken one by one."""

    def __init__(self, what: str, total: int | None, unit: str = "", facts: "TrainingStatus | None" = None) -> None:
        self._what, self._total, self._unit, self._facts = what, total, unit, facts
        self.done = 0
        self._began_s = time.monotonic()
        self._readings = deque[tuple[float, int, int]](maxlen=_READINGS)

    def _reading(self) -> tuple[float, int, int]:
        return time.monotonic(), self.done, 0 if self._facts is None else self._facts.visited()

    def text(self) -> str:
        now_s, done, visited = self._reading()
        if not done:  # readers may have to start
            return f"{self._what}: nothing yet, {now_s - self._began_s:.0f} s"
        if not self._readings or self._readings[-1][1] != done:  # a step may take longer than all readings
            self._readings.append((now_s, done, visited))
        (then_s, done_before, visited_before), (now_s, done, visited) = self._readings[0], self._readings[-1]
        lasted_s = now_s - then_s
        parts = [f"{done / self._total:.0%}"] if self._total else [f"{done:,}{self._unit}"]
        if self._facts is not None:
            parts += self._facts.list((visited - visited_before) / lasted_s if lasted_s else None)
        if self._total and lasted_s:
            left_s = (self._total - done) * lasted_s / (done - done_before)
            parts.append(f"{_format_time(left_s)} left")
        return f"{self._what}: {', '.join(parts)}"


class TrainingStatus:
    """Step, loss and speed of a training, from what the loop keeps anyway."""

    def __init__(self, progress: Progress, reports: Reports, unit: str) -> None:
        self._progress, self._reports, self._unit = progress, reports, unit
        self._loss = ""

    def visited(self) -> int:
        """Return the samples of the epoch that all ranks have taken."""
        return self._progress.position.visited

    def list(self, per_s: float | None) -> list[str]:
        """Return the step, this rank's mean loss since the last report, or of the one before, and the speed."""
        totals = self._reports.window.totals
        if count := totals.get("count"):
            self._loss = f"loss {totals['loss'] / count:.4g}"
        speed = "" if per_s is None else f"{per_s:{',.0f' if per_s >= 10 else '.2g'}} {self._unit}/s"
        return [f"step {self._progress.position.step:,}", *filter(None, [self._loss, speed])]


def _format_time(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def counted(items: Iterable[Item], activity: ItemCount) -> Iterator[Item]:
    """Yield the items, and show how many were taken."""
    life.doing(activity)
    for number, item in enumerate(items):
        activity.done = number
        yield item
    life.doing(None)


class Console:
    """Lines on standard output."""

    def __init__(self, *, is_shown: bool) -> None:
        """Create the console; `is_shown` is True only on rank 0."""
        self._is_shown = is_shown
        self._facts: TrainingStatus | None = None

    def follow(self, progress: Progress, reports: Reports, *, unit: str) -> None:
        """Show step, loss and speed of this training with its epochs."""
        self._facts = TrainingStatus(progress, reports, unit)

    def progress_bar(self, batches: Iterable[Item], *, title: str, total: int) -> Iterable[Item]:
        """Yield the batches of an epoch or a test."""
        return counted(batches, ItemCount(title, total, facts=None if title == "test" else self._facts))

    def print(self, *lines: str) -> None:
        """Print lines."""
        if self._is_shown:
            for line in lines:
                output.print_line(line)

    def print_message(self, severity: Severity, text: str) -> None:
        """Print a note or a warning."""
        if self._is_shown:
            print_message(severity, text, what=output.OUT)

    def print_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Print a message for each anomalous step, from the lines of metrics.jsonl."""
        for event in events:
            self.print_message("warning", f"step {event['step']}: {_format_event(event)}")


def _format_event(event: Mapping[str, Any]) -> str:
    if event["event"] == "skipped":
        why = Skipped(**{name: value for name, value in event.items() if name not in ("event", "step")})
        return f"skipped on {why.ranks or 'all ranks'}, {why.what}"
    if event["event"] == "spike":
        samples = ", ".join(map(str, event["samples"][:_SAMPLES])) + (", ..." if event["samples"][_SAMPLES:] else "")
        change = f"from about {event['usual']:.4g} to {event['loss']:.4g}"
        return f"loss on rank {event['rank']} spiked {change} with samples {samples}"
    return format_behind(event)


def format_behind(event: Mapping[str, Any]) -> str:
    """Format the straggler and its lag from a `behind` event."""
    waited = f"{event['lag_s']:.1f} s ({event['share']:.0%} of their time)"
    return f"straggler: host {event['host']} ({event['ranks']}) made the others wait {waited}"
