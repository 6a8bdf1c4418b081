"""Console output of a run, and a progress bar on a terminal; shown by rank 0."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

from hvdtrain.core.finite import Skipped
from hvdtrain.safety import output
from hvdtrain.safety.exits import Severity, message_line

Item = TypeVar("Item")


def progress_bar(
    items: Iterable[Item], *, is_shown: bool, title: str, unit: str, total: int | None = None
) -> Iterable[Item]:
    """Yield the items, with a progress bar if `is_shown` and standard error is a terminal."""
    if not (is_shown and output.has_terminal()):
        return items
    return tqdm(items, desc=title, unit=unit, total=total, leave=False, dynamic_ncols=True)


class Console:
    """Lines on standard output, with a progress bar below them."""

    def __init__(self, *, is_shown: bool) -> None:
        """Create the console; `is_shown` is True only on rank 0."""
        self._is_shown = is_shown
        self._bar: Iterable[Any] = ()

    def progress_bar(self, batches: Iterable[Item], *, title: str, total: int) -> Iterable[Item]:
        """Yield the batches, with a bar that replaces the previous one."""
        self.close()
        self._bar = bar = progress_bar(batches, is_shown=self._is_shown, title=title, unit="batch", total=total)
        return bar

    def print(self, *lines: str) -> None:
        """Print lines."""
        if not self._is_shown:
            return
        for line in lines:
            if isinstance(self._bar, tqdm):
                with output.lossy(output.OUT):
                    tqdm.write(line)  # clears the bar and redraws it
                    sys.stdout.flush()
            else:
                output.print_line(line)

    def print_events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """Print a message for each anomalous step, from the lines of metrics.jsonl."""
        for event in events:
            severity: Severity = "note" if event["event"] == "joined" else "warning"
            self.print(message_line(severity, f"step {event['step']}: {_format_event(event)}"))

    def turn_on(self) -> None:
        """Print from now on, replacing rank 0."""
        self._is_shown = True

    def close(self) -> None:
        """Remove the progress bar."""
        if isinstance(self._bar, tqdm):
            with output.lossy(output.ERR):
                self._bar.close()
        self._bar = ()


def _format_event(event: Mapping[str, Any]) -> str:
    if event["event"] == "skipped":
        why = Skipped(**{name: value for name, value in event.items() if name not in ("event", "step")})
        return f"skipped on {why.ranks or 'all ranks'}, {why.what}"
    if event["event"] == "spike":
        return f"loss on rank {event['rank']} spiked from about {event['usual']:.4g} to {event['loss']:.4g}"
    return format_behind(event) if event["event"] == "behind" else _format_change(event)


def format_behind(event: Mapping[str, Any]) -> str:
    """Format the straggler and its lag from a `behind` event."""
    waited = f"{event['lag_s']:.1f} s ({event['share']:.0%} of their time)"
    return f"straggler: host {event['host']} ({event['ranks']}) made the others wait {waited}"


def _format_change(event: Mapping[str, Any]) -> str:
    ranks, hosts = _format_ranks(event["ranks"]), ", ".join(event["hosts"])
    if event["event"] == "lost":
        change = f"{ranks} on {hosts} lost"
    else:
        change = f"{ranks} on {hosts} joined, replacing {_format_ranks(event['in_place_of'])}"
    remaining = "1 rank continues" if event["np"] == 1 else f"{event['np']} ranks continue"
    return f"{change}; {remaining} after {event['recovery_s']:.2f} s"


def _format_ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
