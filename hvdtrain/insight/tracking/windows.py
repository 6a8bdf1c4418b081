"""Windows of steps for `hvdlaunch tune`: the number of samples and the time of each."""

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hvdtrain.core.phases import INPUT, Phases
from hvdtrain.loop.hooks import Hook
from hvdtrain.loop.reports import Report
from hvdtrain.ranks.comm import Comm

LEAST_S = 0.25  # of a window: long enough to make a step's own noise smaller than the machine's


class WindowWriter(Hook):
    """Writes a line for each window of steps of an epoch into a file, on rank 0.

    A window lasts from the beginning of a step to the beginning of a later one, and consists of whole rounds of `every`
    steps; it never includes the time between epochs. If phases are measured, lines since a report have their shares of
    a step.
    """

    def __init__(self, file: Path, comm: Comm, phases: Phases, *, batch: float, epoch_samples: int, every: int) -> None:
        """Write to `file`; `batch` is the number of samples per step over all ranks."""
        self._file, self._comm, self._phases = file, comm, phases
        self._batch, self._epoch_samples, self._every = batch, epoch_samples, every
        self._shares: dict[str, Any] = {}
        self._began: tuple[int, float] | None = None  # first step and start time of the window

    def begin_step(self, number: int) -> None:
        if self._comm.rank > 0:
            return
        now_s = time.perf_counter()
        if self._began is None:
            self._began = number, now_s
            return
        first, since_s = self._began
        lasted_s = now_s - since_s
        if lasted_s >= LEAST_S and (number - first) % self._every == 0:
            line = {
                "samples": (number - first) * self._batch,
                "seconds": lasted_s,
                "epoch_samples": self._epoch_samples,
            }
            write_window(self._file, line | self._shares)
            self._began = number, now_s

    def record(self, report: Report) -> None:
        """Record the minimum share of communication over ranks: the wait for a slower rank is not the network's."""
        means = self._phases.means()
        if means is None:  # on all ranks
            return
        step_s = sum(means.phases_s.values())
        own = [means.phases_s["sync"] / step_s, sum(means.phases_s[phase] for phase in INPUT) / step_s]
        of_ranks = self._comm.allgather(own)
        communication, read = (min(shares) for shares in zip(*of_ranks, strict=True))
        self._shares = {"shares": {"communication": communication, "input": read}}

    def epoch_trained(self, count: int) -> None:
        self._began = None


def write_window(file: Path, line: Mapping[str, Any]) -> None:
    """Append a line for hvdlaunch, which may have gone meanwhile."""
    with contextlib.suppress(OSError), open(file, "ab", opener=_open_at_once) as windows:
        windows.write(f"{json.dumps(line)}\n".encode())


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o600)
