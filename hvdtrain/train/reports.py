"""What the ranks tell each other at report steps, in one sum."""

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass

import torch

from hvdtrain.checkpoint.save_points import Asked
from hvdtrain.ranks.comm import Comm
from hvdtrain.record.gauges import Gauges
from hvdtrain.safety.exits import EndOfRun
from hvdtrain.train.divergence import Skipped, Spike

# Up to so many ranks each one's speed, and each one's GPU, has a curve of its own.
MOST_CURVES = 16


@dataclass(frozen=True, kw_only=True)
class Means:
    """Over all images of all ranks; NaN where there were none."""

    loss: float
    accuracy: float  # 0 to 1


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over images of all ranks."""

    loss: float = 0.0
    right: float = 0.0
    count: float = 0.0

    def __add__(self, other: "Totals") -> "Totals":
        return Totals(loss=self.loss + other.loss, right=self.right + other.right, count=self.count + other.count)

    def means(self) -> Means:
        """Per image."""
        if not self.count:  # every step was skipped
            return Means(loss=math.nan, accuracy=math.nan)
        return Means(loss=self.loss / self.count, accuracy=self.right / self.count)


@dataclass(frozen=True, kw_only=True)
class Report:
    """The steps since the last report; the same on all ranks."""

    step: int  # the last of them; 1 is the first of the run
    steps: int  # taken or skipped
    totals: Totals  # of the steps that were taken
    unreadable: int  # images of all ranks that could not be decoded
    skipped: list[tuple[int, Skipped]]  # step and reason
    spikes: list[Spike]  # of all ranks
    lr: float
    grad_norm: float | None  # of the last step, before clipping; None where it was not measured
    loss_scale: float
    images_per_s: list[float]  # by rank
    hosts: dict[str, float]  # gauges of all hosts; NaN where one could not be read
    visited: int  # images of the epoch at hand, by all ranks
    asked: Asked  # what is to be done now
    end: EndOfRun | None  # why the run ends here

    def scalars(self) -> dict[str, float]:
        """Its numbers, by the names of TensorBoard and metrics.jsonl; what could not be read is left out."""
        means = self.totals.means()
        numbers = {
            "train/loss": means.loss,
            "train/accuracy": means.accuracy,
            "train/lr": self.lr,
            **({} if self.grad_norm is None else {"train/grad_norm": self.grad_norm}),
            "train/loss_scale": self.loss_scale,
            "train/images_per_s": sum(self.images_per_s),
        }
        speeds = self.images_per_s
        if len(speeds) <= MOST_CURVES:
            by_rank = {f"rank{rank}": speed for rank, speed in enumerate(speeds)}
        else:
            by_rank = {"slowest": min(speeds), "mean": sum(speeds) / len(speeds), "fastest": max(speeds)}
        numbers |= {f"train_by_rank/images_per_s_{name}": speed for name, speed in by_rank.items()}
        return numbers | {name: value for name, value in self.hosts.items() if not math.isnan(value)}


class Window:
    """One rank's steps since its last report."""

    def __init__(self) -> None:
        self.loss = 0.0
        self.right = 0
        self.count = 0
        self.visited = 0  # images, those of skipped steps included
        self.steps = 0
        self.unreadable = 0
        self.skipped: list[tuple[int, Skipped]] = []
        self.spikes: list[Spike] = []
        self._since = time.perf_counter()

    def visit(self, count: int) -> None:
        """Take in a step over `count` images of this rank, whether it was taken or skipped."""
        self.steps += 1
        self.visited += count

    def add(self, *, loss: float, right: int, count: int) -> None:
        """Take in a step that was taken: sums over this rank's `count` images."""
        self.loss += loss
        self.right += right
        self.count += count

    def images_per_s(self) -> float:
        """By this rank's clock, since the window was made."""
        return self.visited / (time.perf_counter() - self._since)


class Reports:
    """Says when to report, and makes one rank's window everybody's report; made and used by all ranks together."""

    def __init__(self, comm: Comm, gauges: Gauges, *, every_steps: int, device: torch.device) -> None:
        self.every_steps = every_steps
        self._comm = comm
        self._gauges = gauges
        self._device = device
        everyones = comm.gather(list(gauges.names))
        self._names = [name for names in everyones for name in names]
        self._first = sum(len(names) for names in everyones[: comm.rank])

    def due(self, step: int, *, last: int) -> bool:
        """Whether to report after this step, `last` being the last one of the epoch."""
        return step == last or step % self.every_steps == 0

    def share(
        self,
        window: Window,
        *,
        step: int,
        lr: float,
        grad_norm: float | None,
        loss_scale: float,
        visited: int,
        asked: Asked,
        end: EndOfRun | None,
    ) -> Report:
        """One sum, and a gather where a rank has seen a spike."""
        comm = self._comm
        speeds, gauges = [0.0] * comm.size, [0.0] * len(self._names)
        speeds[comm.rank] = window.images_per_s()
        latest = self._gauges.latest()
        gauges[self._first : self._first + len(latest)] = latest
        mine = [window.loss, window.right, window.count, window.unreadable, len(window.spikes), *speeds, *gauges]
        everyones = comm.sum(torch.tensor(mine, dtype=torch.float64, device=self._device))
        loss, right, count, unreadable, spikes, *rest = everyones.tolist()
        return Report(
            step=step,
            steps=window.steps,
            totals=Totals(loss=loss, right=right, count=count),
            unreadable=round(unreadable),
            skipped=window.skipped,
            spikes=_everyones(comm, window.spikes) if spikes else [],
            lr=lr,
            grad_norm=grad_norm,
            loss_scale=loss_scale,
            images_per_s=rest[: comm.size],
            hosts=dict(zip(self._names, rest[comm.size :], strict=True)),
            visited=visited,
            asked=asked,
            end=end,
        )


def _everyones(comm: Comm, spikes: Iterable[Spike]) -> list[Spike]:
    return [Spike(**one) for rank in comm.gather([asdict(one) for one in spikes]) for one in rank]
