"""Reports, for which the ranks exchange their numbers in a single all-reduce."""

import json
import math
import socket
import statistics
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hvdtrain.core.finite import SPIKE, Skipped, Spike, SpikeWatch, rank_range
from hvdtrain.core.pending import StepDone
from hvdtrain.core.phases import OFF
from hvdtrain.core.task import UNREADABLE, Task, Totals, added, metrics_of
from hvdtrain.loop.progress import Unreported
from hvdtrain.loop.save_points import Decision
from hvdtrain.loop.stragglers import Behind, News, OwnTime, Stragglers
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import EndOfRun

# With at most this number of ranks each rank's speed and GPU has its own curve; with at most this number of hosts, each
# host's gauges do.
MOST_CURVES = 16


@dataclass(frozen=True, kw_only=True)
class Report:
    """The steps since the last report; equal on all ranks, except for fields that only rank 0 has.

    >>> report.step, report.totals["count"], list(report.metrics)  # of the training in the example of Training
    (4, 8.0, ['loss'])
    """

    step: int  # the last of the steps; the run's first step is 1
    steps: int  # taken or skipped
    unit: str  # name of a sample
    totals: Totals  # over the steps that were taken
    metrics: dict[str, float]  # of these totals
    unreadable: int  # samples of all ranks that could not be read
    skipped: list[tuple[int, Skipped]]  # step and reason; of each group, if groups step on their own
    loss_spikes: int  # of all ranks
    spikes: list[Spike]  # the spikes of all ranks, on rank 0 only
    lr: float
    grad_norm: float | None  # of the last step, before clipping; None if it was not measured
    loss_scale: float
    units_per_s: Tensor  # (ranks,), by rank
    own_s: Tensor  # (ranks,), each rank's time in these steps without waiting for others
    gauges: Sequence[tuple[int, str]]  # of all hosts: the rank that reads the gauge, and usage/HOST/WHAT
    readings: Tensor  # (gauges,); NaN if a gauge could not be read
    visited: int  # samples of the current epoch, by all ranks
    decision: Decision  # what to do after this report
    end: EndOfRun | None  # why the run ends here
    behind: Behind | None = None  # the straggler; not determined for each report

    def scalars(self) -> dict[str, float]:
        """Return the scalars by their names in TensorBoard and metrics.jsonl, without values that could not be read.

        Their number is bounded for any number of ranks and hosts.
        """
        speeds, name = dict(enumerate(self.units_per_s.tolist())), f"train_by_rank/{self.unit}_per_s"
        own_ms = {rank: 1000 * own_s / self.steps for rank, own_s in enumerate(self.own_s.tolist())}
        return {
            **{f"train/{name}": value for name, value in self.metrics.items()},
            "train/lr": self.lr,
            **({} if self.grad_norm is None else {"train/grad_norm": self.grad_norm}),
            "train/loss_scale": self.loss_scale,
            f"train/{self.unit}_per_s": sum(speeds.values()),
            **_curves(name, speeds),
            **_curves("train_by_rank/own_ms", own_ms),
            **self._usage(),
        }

    def _usage(self) -> dict[str, float]:
        """Return the gauges of each host, or a summary if there are many hosts."""
        readings = zip(self.gauges, self.readings.tolist(), strict=True)
        valid = [(rank, name, value) for (rank, name), value in readings if not math.isnan(value)]
        if len({rank for rank, _ in self.gauges}) <= MOST_CURVES:
            return {name: value for _, name, value in valid}
        by_gauge: dict[str, dict[int, float]] = defaultdict(dict)
        for rank, name, value in valid:
            by_gauge[name.rpartition("/")[2]][rank] = value
        return {
            name: value
            for gauge, by_rank in by_gauge.items()
            for name, value in _spread(f"usage/{gauge}", by_rank).items()
        }

    def power_w(self) -> float | None:
        """Return the current power of the GPUs of all hosts; None without GPUs, or if one of them could not be read."""
        readings = zip(self.gauges, self.readings.tolist(), strict=True)
        powers = [value for (_, name), value in readings if name.endswith("power_w")]
        return None if not powers or any(map(math.isnan, powers)) else math.fsum(powers)

    def events(self) -> list[dict[str, Any]]:
        """Return the faults and warnings of these steps, as lines of metrics.jsonl."""
        skipped = [{"event": "skipped", "step": step, **why.to_event()} for step, why in self.skipped]
        spikes = [{"event": "spike", **asdict(spike)} for spike in self.spikes]
        return skipped + spikes + ([] if self.behind is None else [{"event": "behind", **asdict(self.behind)}])

    def counts(self) -> dict[str, int]:
        """Return the counts that result.json adds up over the run."""
        return {
            "skipped_steps": len(self.skipped),
            "loss_spikes": self.loss_spikes,
            f"unreadable_{self.unit}": self.unreadable,
        }


def _curves(name: str, by_rank: Mapping[int, float]) -> dict[str, float]:
    """Return one scalar per rank, or five if there are many ranks."""
    if len(by_rank) > MOST_CURVES:
        return _spread(name, by_rank)
    return {f"{name}_rank{rank}": value for rank, value in by_rank.items()}


def _spread(name: str, by_rank: Mapping[int, float]) -> dict[str, float]:
    """Return minimum, mean and maximum of a scalar, and the ranks of both extremes; placement.json has their hosts."""
    lowest, highest = (end(by_rank, key=lambda rank: by_rank[rank]) for end in (min, max))
    return {
        f"{name}_lowest": by_rank[lowest],
        f"{name}_mean": statistics.fmean(by_rank.values()),
        f"{name}_highest": by_rank[highest],
        f"{name}_lowest_rank": lowest,
        f"{name}_highest_rank": highest,
    }


class Window:
    """One rank's steps since its last report."""

    def __init__(self) -> None:
        self.totals: Totals = {}  # over the steps that were taken
        self.visited = 0.0  # samples, including those of skipped steps
        self.steps = 0
        self.unreadable = 0
        self.skipped: list[tuple[int, Skipped]] = []
        self.spikes: list[Spike] = []
        self.grad_norm = math.nan  # of the last step
        self.waited_s = 0.0  # for other groups of ranks
        self._since = time.perf_counter()

    def add(self, step: int, done: StepDone, *, count: float) -> None:
        """Add a step, taken or skipped, with `count` samples: this rank's share of its replica's samples."""
        self.steps += 1
        self.visited += count
        self.grad_norm = done.grad_norm
        self.unreadable += round(done.totals.get(UNREADABLE, 0))
        if done.skipped:
            self.skipped.append((step, done.skipped))
        taken = dict.fromkeys(done.totals, 0.0) if done.skipped else done.totals  # all ranks have the same names
        self.totals = added(self.totals, taken)

    def unreported(self) -> Unreported:
        """Return what this rank knows of these steps, for a snapshot."""
        return Unreported(
            totals=self.totals,
            unreadable=self.unreadable,
            loss_spikes=len(self.spikes),
            skipped_steps=len(self.skipped),
        )

    def lasted_s(self) -> float:
        """The seconds since the window was created, by this rank's clock."""
        return time.perf_counter() - self._since

    def units_per_s(self) -> float:
        """The speed over the window's time."""
        return self.visited / self.lasted_s()


class GaugeReader(Protocol):
    """The gauges that a rank reads on its host."""

    names: tuple[str, ...]

    def latest(self) -> list[float]:
        """Return the latest readings, in the order of `names`; NaN if one is missing."""


class Reports:
    """Collects the steps since the last report, and combines the windows of all ranks into one report."""

    def __init__(
        self,
        comm: Comm,
        gauges: GaugeReader,
        task: Task,
        *,
        every_steps: int,
        device: torch.device,
        own_time: OwnTime | None = None,
    ) -> None:
        """Create the reports of this rank, which reads these gauges; `own_time` is the clock of the run's steps."""
        self.every_steps = every_steps
        self.spikes = SpikeWatch(comm.rank)
        self.window = Window()
        self._comm = comm
        self._gauges = gauges
        self._task = task
        self._device = device
        self._own_time = own_time or OwnTime(OFF, device)
        self._news = News()  # of groups of ranks
        self._hosts = comm.allgather(socket.gethostname())
        self._stragglers = Stragglers(self._hosts, parts=comm.replica.size)
        names_by_rank = comm.allgather(list(gauges.names))
        self._gauges_of_all = [(rank, name) for rank, names in enumerate(names_by_rank) for name in names]
        self._first = sum(len(names) for names in names_by_rank[: comm.rank])

    def restart(self) -> None:
        """Begin a new window."""
        self.window = Window()
        self._own_time.restart()

    def add(self, number: int, done: StepDone, *, count: float, samples: Sequence[Tensor] = ()) -> None:
        """Add a step, taken or skipped, with `count` of these samples (N,); detect a spike of its loss."""
        self.window.add(number, done, count=count)
        total = done.totals.get("count")
        if (done.skipped is None or done.skipped.source == SPIKE) and total:
            spike = self.spikes.see(number, done.totals["loss"] / total, total, samples)
            self.window.spikes += [spike] if spike else []

    def is_due(self, step: int, *, last: int) -> bool:
        """Return whether to report after this step; `last` is the last step of the epoch."""
        return step == last or step % self.every_steps == 0

    def report(
        self,
        *,
        step: int,
        lr: float,
        grad_norm: float | None,
        loss_scale: float,
        visited: int,
        decision: Decision,
        end: EndOfRun | None,
    ) -> Report:
        """Make a report with one all-reduce, and a gather if a rank has seen a spike.

        The all-reduced vector has separate elements for each rank's speed, each rank's own time and each gauge: 23 KB
        for 1,024 ranks on 128 hosts.
        """
        comm, window, latest = self._comm, self.window, self._gauges.latest()
        counted = [*window.totals.values(), window.unreadable, len(window.spikes)]
        if comm.replica.rank > 0:  # its replica is already counted
            counted = [0.0] * len(counted)
        by_rank = torch.zeros(2, comm.size, dtype=torch.float64)
        by_rank[:, comm.rank] = torch.tensor([window.units_per_s(), self._own_time.pop_s()])
        readings = torch.zeros(len(self._gauges_of_all), dtype=torch.float64)
        readings[self._first : self._first + len(latest)] = torch.tensor(latest, dtype=torch.float64)
        lasted_s = window.lasted_s() if comm.rank == 0 else 0.0
        here = torch.cat([torch.tensor([*counted, lasted_s], dtype=torch.float64), by_rank.flatten(), readings])
        arrived_at_s = time.perf_counter()
        sums, speeds, own_s, readings = (
            comm.allreduce(here.to(self._device)).cpu().split([len(counted) + 1, comm.size, comm.size, len(readings)])
        )
        window.waited_s += time.perf_counter() - arrived_at_s  # groups that step on their own meet only here
        *of_totals, unreadable, loss_spikes, elapsed_s = sums.tolist()
        behind = self._stragglers.see(own_s.tolist(), step=step, steps=window.steps, elapsed_s=elapsed_s)
        skipped = window.skipped
        if comm.sync_group.size < comm.size:
            skipped, behind = self._of_groups(window, step)
        totals = dict(zip(window.totals, of_totals, strict=True))
        return Report(
            step=step,
            steps=window.steps,
            unit=self._task.unit,
            totals=totals,
            metrics=metrics_of(self._task, totals),
            unreadable=round(unreadable),
            skipped=skipped,
            loss_spikes=round(loss_spikes),
            spikes=_on_rank_0(comm, [] if comm.replica.rank else window.spikes) if loss_spikes else [],
            lr=lr,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            units_per_s=speeds,
            own_s=own_s,
            gauges=self._gauges_of_all,
            readings=readings,
            behind=behind,
            visited=visited,
            decision=decision,
            end=end,
        )

    def _of_groups(self, window: Window, step: int) -> tuple[list[tuple[int, Skipped]], Behind | None]:
        """Return what each group of ranks has skipped, and the group that makes others wait."""
        group = self._comm.sync_group
        skipped = [[number, asdict(why)] for number, why in window.skipped]
        first = group.rank == 0
        answers = self._comm.allgather([skipped, window.waited_s, window.lasted_s()] if first else None)
        by_group = [answer for answer in answers if answer is not None]
        waits_s = [waited_s for _, waited_s, _ in by_group]
        last = waits_s.index(min(waits_s))
        lag_s, rank = max(waits_s) - waits_s[last], last * group.size
        share = lag_s / max(lasted_s for *_, lasted_s in by_group)
        ranks = rank_range(rank, group.size)
        behind = Behind(step=step, host=self._hosts[rank], rank=rank, ranks=ranks, lag_s=lag_s, share=share)
        group_skips = [(number, Skipped(**why)) for of_group, *_ in by_group for number, why in of_group]
        # steps that all groups skipped together count once
        all_skipped = dict.fromkeys(sorted(group_skips, key=lambda skip: skip[0]))
        return list(all_skipped), self._news.of(behind)


def _on_rank_0(comm: Comm, spikes: Iterable[Spike]) -> list[Spike]:
    """Gather the spikes of all ranks on rank 0; other ranks get an empty list."""
    contents = comm.gather(json.dumps([asdict(spike) for spike in spikes]).encode())
    return [Spike(**spike) for of_rank in contents for spike in json.loads(of_rank)]
