"""The progress of a job in one line, read from the files of its ranks.

A rank is up once its log exists. Rank 0 of hvdtrain reports what it does. The straggler comes from the run folder
(metrics.jsonl): the group of ranks named in a report, or the ranks that the others wait for while there is no report.
"""

import contextlib
import json
import math
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.errors import harmless
from launch.files import open_regular
from launch.placement.slots import RankSlot
from launch.run.supervise.failure import all_named
from launch.run.supervise.rank_logs import Logs, read_report
from launch.run.supervise.traces.files import read_traces

SPEED = re.compile(r"train/[a-z]+_per_s")
BEHIND_S = 60.0  # a group is named once, when it falls behind, and shown for this time
# After this time without a report, and after this multiple of the time between the last two, the ranks may be waiting
# for one of them.
STALLED_S, STALLED_REPORTS = 10.0, 3
POLL_S = 2.0  # between two checks for late ranks
MOST_RANKS = 256  # each has several files, possibly on a network file system
CHUNK_BYTES = 1 << 20


class JobProgress:
    """The progress of a job; create it before the start, to recognize logs of an earlier attempt."""

    def __init__(self, slots: Sequence[RankSlot], logs: Logs, report: Path, *, apart: bool) -> None:
        """Create the display; `apart`: a host does not share the log folder, so it is unknown which ranks are up."""
        self._slots, self._logs, self._report, self._apart = slots, logs, report, apart
        self._old_logs = self._log_numbers()
        self._metrics: Metrics | None = None
        self._has_begun = False
        self._seconds = self._gap_s = math.nan  # of the last report by the run's clock, and since the one before
        self._behind, self._behind_until = "", -math.inf
        self._reported_at = self._polled_at = -math.inf
        self._late: dict[int, str] = {}  # ranks that were not waiting at the last check, with their place

    def line(self) -> str:
        """Return the current line; empty if there is nothing to say of ranks on a single host."""
        now, report = time.monotonic(), read_report(self._report)
        if self._metrics is None and report.run_folder is not None:
            self._metrics, self._reported_at = Metrics(Path(report.run_folder) / "metrics.jsonl"), now
        if self._metrics is not None:
            self._take(self._metrics.new(), now)
            self._look_for_late_ranks(self._metrics.file.parent / "ranks", now)
        behind = self._behind if now < self._behind_until else ""
        parts = list(filter(None, [self._up(speak=bool(report.doing)), report.doing, behind]))
        return harmless(f"hvdlaunch: {' | '.join(parts)}") if parts else ""

    def _up(self, *, speak: bool) -> str:
        """Return which hosts and ranks are up; empty if all ranks of a single host are, and rank 0 speaks."""
        hosts = {slot.host for slot in self._slots}
        if self._apart:
            return f"{len(hosts)} hosts, {len(self._slots)} ranks"
        up = list(self._slots)
        if not self._has_begun:  # a step implies that all ranks are up
            logs = zip(self._slots, self._old_logs, self._log_numbers(), strict=True)
            up = [slot for slot, old, new in logs if new is not None and new != old]
        ranks_up, hosts_up = f"{_of(len(up), len(self._slots), 'rank')} up", len({slot.host for slot in up})
        if len(hosts) == 1:
            return "" if len(up) == len(self._slots) and (speak or self._has_printed()) else ranks_up
        return f"{_of(hosts_up, len(hosts), 'host')}, {ranks_up}"

    def _has_printed(self) -> bool:
        """Return whether rank 0 has printed something."""
        with contextlib.suppress(OSError):
            return self._logs.file(0).stat().st_size > 0
        return False

    def _log_numbers(self) -> list[int | None]:
        """Return the inode of each rank's log, which distinguishes it from earlier logs; None without a log."""
        try:
            with os.scandir(self._logs.folder) as entries:
                numbers = {entry.name: entry.inode() for entry in entries}
        except OSError:
            numbers = {}
        return [numbers.get(self._logs.file(slot.rank).name) for slot in self._slots]

    def _take(self, lines: Iterable[Mapping[str, Any]], now: float) -> None:
        """Update the progress from new lines of metrics.jsonl."""
        for line in lines:
            kind, step, seconds = line.get("event"), line.get("step"), line.get("seconds")
            # An epoch's line follows the report of its last step.
            is_report = kind is None and "epoch" not in line and any(map(SPEED.fullmatch, line))
            if kind == "behind":
                self._behind = f"{line.get('host')} (rank {line.get('rank')}) fell behind at step {step}"
                self._behind_until = now + BEHIND_S
            elif is_report and isinstance(step, int) and isinstance(seconds, float):
                self._gap_s, self._seconds = seconds - self._seconds, seconds
                self._has_begun, self._reported_at = True, now

    def _look_for_late_ranks(self, folder: Path, now: float) -> None:
        """Find the ranks that the others wait for, if there was no report for a long time."""
        patience_s = max(STALLED_S, 0.0 if math.isnan(self._gap_s) else STALLED_REPORTS * self._gap_s)
        is_due = now >= self._polled_at + POLL_S and len(self._slots) <= MOST_RANKS
        if now < self._reported_at + patience_s or not is_due:
            return
        self._polled_at = now
        traces = read_traces(folder, range(len(self._slots)))
        late = {rank: trace.at for rank, trace in traces.items() if trace.at is not None and not trace.waited}
        if late and late == self._late and any(trace.waited for trace in traces.values()):  # twice the same
            places = set(late.values())
            at = f" {places.pop()}" if len(places) == 1 else ""
            self._behind, self._behind_until = f"waiting for {all_named(late, self._slots)}{at}", now + 2 * POLL_S
        self._late = late


class Metrics:
    """The lines that a run appends to a file of JSON lines; lines of earlier attempts are skipped."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._read_bytes = self._size()

    def new(self) -> list[dict[str, Any]]:
        """Return the complete lines since the last call; a line that is not a JSON object is skipped."""
        self._read_bytes = min(self._read_bytes, self._size())  # a resumed run truncates its file
        try:
            with open_regular(self.file) as stream:
                stream.seek(self._read_bytes)
                text = stream.read(CHUNK_BYTES)
        except (OSError, ValueError):
            return []
        whole = text[: text.rfind(b"\n") + 1] or (text if len(text) == CHUNK_BYTES else b"")
        self._read_bytes += len(whole)
        values = []
        for line in whole.splitlines():
            with contextlib.suppress(ValueError, RecursionError):
                values.append(json.loads(line))
        return [value for value in values if isinstance(value, dict)]

    def _size(self) -> int:
        try:
            return self.file.stat().st_size
        except (OSError, ValueError):  # an untrusted path may contain a zero byte
            return 0


def _of(part: int, whole: int, noun: str) -> str:
    """Format as `1 of 2 hosts`, or `2 hosts` if that is all of them."""
    return f"{part} {noun}{'' if part == 1 else 's'}" if part == whole else f"{part} of {whole} {noun}s"
