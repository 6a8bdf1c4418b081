"""What the ranks tell each other at report steps, in one sum."""

import math
import socket
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from hvdtrain.checkpoint.save_points import Decision
from hvdtrain.ranks.comm import Comm
from hvdtrain.record import gauges
from hvdtrain.record.gauges import Gauges
from hvdtrain.safety.exits import EndOfRun
from hvdtrain.train.finite import Skipped, Spike, SpikeWatch
from hvdtrain.train.step import StepDone
from hvdtrain.train.task import UNREADABLE, Task, Totals, added

# Up to so many ranks each one's speed, and each one's GPU, has a curve of its own.
MOST_CURVES = 16


@dataclass(frozen=True, kw_only=True)
class Report:
    """The steps since the last report; the same on all ranks."""

    step: int  # the last of them; 1 is the first of the run
    steps: int  # taken or skipped
    unit: str  # of what is counted
    totals: Totals  # of the steps that were taken
    metrics: dict[str, float]  # of these totals
    unreadable: int  # samples of all ranks that could not be read
    skipped: list[tuple[int, Skipped]]  # step and reason
    spikes: list[Spike]  # of all ranks
    lr: float
    grad_norm: float | None  # of the last step, before clipping; None where it was not measured
    loss_scale: float
    units_per_s: list[float]  # by rank
    hosts: dict[str, float]  # gauges of all hosts; NaN where one could not be read
    visited: int  # samples of the epoch at hand, by all ranks
    decision: Decision  # what is to be done now
    end: EndOfRun | None  # why the run ends here

    def scalars(self) -> dict[str, float]:
        """Its numbers, by the names of TensorBoard and metrics.jsonl; what could not be read is left out."""
        numbers = {
            **{f"train/{name}": value for name, value in self.metrics.items()},
            "train/lr": self.lr,
            **({} if self.grad_norm is None else {"train/grad_norm": self.grad_norm}),
            "train/loss_scale": self.loss_scale,
            f"train/{self.unit}_per_s": sum(self.units_per_s),
        }
        speeds = self.units_per_s
        if len(speeds) <= MOST_CURVES:
            by_rank = {f"rank{rank}": speed for rank, speed in enumerate(speeds)}
        else:
            by_rank = {"slowest": min(speeds), "mean": sum(speeds) / len(speeds), "fastest": max(speeds)}
        numbers |= {f"train_by_rank/{self.unit}_per_s_{name}": speed for name, speed in by_rank.items()}
        return numbers | {name: value for name, value in self.hosts.items() if not math.isnan(value)}

    def events(self) -> list[dict[str, Any]]:
        """What was not as it should be, as lines of metrics.jsonl."""
        skipped = [{"event": "skipped", "step": step, **asdict(why)} for step, why in self.skipped]
        return skipped + [{"event": "spike", **asdict(spike)} for spike in self.spikes]

    def counts(self) -> dict[str, int]:
        """What result.json adds up over the run."""
        return {
            "skipped_steps": len(self.skipped),
            "loss_spikes": len(self.spikes),
            f"unreadable_{self.unit}": self.unreadable,
        }


class Window:
    """One rank's steps since its last report."""

    def __init__(self) -> None:
        self.totals: Totals = {}  # of the steps that were taken
        self.visited = 0.0  # what the samples weigh, those of skipped steps included
        self.steps = 0
        self.unreadable = 0
        self.skipped: list[tuple[int, Skipped]] = []
        self.spikes: list[Spike] = []
        self._since = time.perf_counter()

    def add(self, step: int, done: StepDone, *, count: float) -> None:
        """Take in a step, taken or skipped, over samples of this rank that weigh `count`."""
        self.steps += 1
        self.visited += count
        self.unreadable += round(done.totals.get(UNREADABLE, 0))
        if done.skipped:
            self.skipped.append((step, done.skipped))
        else:
            self.totals = added(self.totals, done.totals)

    def units_per_s(self) -> float:
        """By this rank's clock, since the window was made."""
        return self.visited / (time.perf_counter() - self._since)


class Reports:
    """Says when to report, and makes one rank's window everybody's report; made and used by all ranks together."""

    def __init__(self, comm: Comm, host: Gauges, task: Task, *, every_steps: int, device: torch.device) -> None:
        self.every_steps = every_steps
        self.spikes = SpikeWatch(comm.rank)
        self._comm = comm
        self._gauges = host
        self._task = task
        self._device = device
        names_by_rank = comm.allgather(list(host.names))
        self._names = [name for names in names_by_rank for name in names]
        self._first = sum(len(names) for names in names_by_rank[: comm.rank])

    def is_due(self, step: int, *, last: int) -> bool:
        """Whether to report after this step, `last` being the last one of the epoch."""
        return step == last or step % self.every_steps == 0

    def report(
        self,
        window: Window,
        *,
        step: int,
        lr: float,
        grad_norm: float | None,
        loss_scale: float,
        visited: int,
        decision: Decision,
        end: EndOfRun | None,
    ) -> Report:
        """One sum, and an allgather where a rank has seen a spike."""
        comm = self._comm
        speeds, readings = [0.0] * comm.size, [0.0] * len(self._names)
        speeds[comm.rank] = window.units_per_s()
        latest = self._gauges.latest()
        readings[self._first : self._first + len(latest)] = latest
        mine = [*window.totals.values(), window.unreadable, len(window.spikes), *speeds, *readings]
        everybodys = comm.allreduce(torch.tensor(mine, dtype=torch.float64, device=self._device)).tolist()
        sums, (unreadable, spikes, *rest) = everybodys[: len(window.totals)], everybodys[len(window.totals) :]
        totals = dict(zip(window.totals, sums, strict=True))
        return Report(
            step=step,
            steps=window.steps,
            unit=self._task.unit,
            totals=totals,
            metrics=self._task.metrics(totals),
            unreadable=round(unreadable),
            skipped=window.skipped,
            spikes=_of_all_ranks(comm, window.spikes) if spikes else [],
            lr=lr,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            units_per_s=rest[: comm.size],
            hosts=dict(zip(self._names, rest[comm.size :], strict=True)),
            visited=visited,
            decision=decision,
            end=end,
        )


def _of_all_ranks(comm: Comm, spikes: Iterable[Spike]) -> list[Spike]:
    return [Spike(**spike) for of_rank in comm.allgather([asdict(spike) for spike in spikes]) for spike in of_rank]


def host_gauges(comm: Comm, device: torch.device) -> Gauges:
    """The first local rank of each host reads the GPUs of all ranks there."""
    uuid = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
    host = socket.gethostname()
    here = [theirs for where, theirs in comm.allgather([host, uuid]) if where == host and theirs is not None]
    if comm.local_rank != 0:
        return Gauges(gauges.none)
    return Gauges(gauges.of_host(here, each=comm.size <= MOST_CURVES))
