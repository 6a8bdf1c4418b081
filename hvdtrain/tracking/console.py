"""The lines that a person sees while a run goes on, and on a terminal how far it is; rank 0 shows them."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from tqdm import tqdm

Thing = TypeVar("Thing")


def progress(
    things: Iterable[Thing], *, shown: bool, what: str, unit: str, total: int | None = None
) -> Iterable[Thing]:
    """The same things, with a bar of how many were taken if it is `shown` and standard error is a terminal."""
    if not (shown and sys.stderr.isatty()):
        return things
    return tqdm(things, desc=what, unit=unit, total=total, leave=False, dynamic_ncols=True)


class Console:
    """Lines on standard output, and a bar below them of what is under way."""

    def __init__(self, *, shown: bool) -> None:
        """`shown` on rank 0 alone."""
        self._shown = shown
        self._bar: Iterable[Any] = ()

    def progress(self, batches: Iterable[Thing], *, what: str, total: int) -> Iterable[Thing]:
        """The same batches, with the one bar that there is at a time."""
        self.close()
        self._bar = bar = progress(batches, shown=self._shown, what=what, unit="batch", total=total)
        return bar

    def say(self, *lines: str) -> None:
        """Print lines."""
        if not self._shown:
            return
        for line in lines:
            if isinstance(self._bar, tqdm):
                tqdm.write(line)  # clears the bar and draws it again
                sys.stdout.flush()
            else:
                print(line, flush=True)

    def events(self, events: Iterable[Mapping[str, Any]]) -> None:
        """A line for each step that was not as it should be, from the lines of metrics.jsonl."""
        for event in events:
            if event["event"] == "skipped":
                whose = "" if event["rank"] is None else f" of rank {event['rank']}"
                who = event.get("ranks", "all ranks")
                self.say(f"step {event['step']} skipped on {who}: the {event['source']}{whose} not finite")
            elif event["event"] in ("lost", "joined"):
                self.say(_other_ranks(event))
            elif event["event"] == "behind":
                whom = f"host {event['host']} (rank {event['rank']} and those with it)"
                waited = f"{event['lag_s']:.1f} s, {event['share']:.0%} of their time,"
                self.say(f"step {event['step']}: other groups have waited {waited} for {whom}")
            else:
                jump = f"from about {event['usual']:.4g} to {event['loss']:.4g}"
                self.say(f"step {event['step']}: the loss of rank {event['rank']} jumped {jump}")

    def show(self) -> None:
        """Say from now on what rank 0 has said."""
        self._shown = True

    def close(self) -> None:
        """Take the bar away."""
        if isinstance(self._bar, tqdm):
            self._bar.close()
        self._bar = ()


SILENT = Console(shown=False)


def _other_ranks(event: Mapping[str, Any]) -> str:
    who, hosts = _ranks(event["ranks"]), ", ".join(event["hosts"])
    if event["event"] == "lost":
        what = f"{who} on {hosts} lost"
    else:
        what = f"{who} on {hosts} joined in place of {_ranks(event['in_place_of'])}"
    there = "1 rank goes" if event["np"] == 1 else f"{event['np']} ranks go"
    return f"step {event['step']}: {what}; {there} on after {event['recovery_s']:.2f} s"


def _ranks(numbers: Sequence[int]) -> str:
    return f"rank {numbers[0]}" if len(numbers) == 1 else f"ranks {', '.join(map(str, numbers))}"
