"""The lines that a person sees while a run goes on; rank 0 prints them."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tqdm import tqdm


class Console:
    """A bar of the epochs on a terminal, and lines above it."""

    def __init__(self, *, shown: bool, epochs: int, done: int) -> None:
        """`shown` on rank 0 alone; `done` of the epochs were done before."""
        self._shown = shown
        self._bar = tqdm(total=epochs, initial=done, unit="epoch", disable=not shown or not sys.stderr.isatty())

    def say(self, *lines: str) -> None:
        """Print lines."""
        if not self._shown:
            return
        for line in lines:
            if self._bar.disable:
                print(line, flush=True)
            else:
                self._bar.write(line)

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

    def epoch_done(self, line: str) -> None:
        """One epoch more."""
        self._bar.update()
        self.say(line)

    def close(self) -> None:
        """Leave the bar as it is."""
        self._bar.close()


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
