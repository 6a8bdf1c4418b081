"""A verdict from the clocks of all ranks: the slowest rank, what limits the run, and what would help."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from hvdtrain.core.phases import COMPUTE, INPUT, PHASES, Phase, StepMeans

Kind = Literal["compute-bound", "input-bound", "communication-bound", "pipeline-bound", "straggler"]

# The share of a step from which a change is worthwhile. Removing a fifth makes training a quarter faster; a straggler
# costs all ranks its share, and checking one host may be enough.
MIN_SHARES: dict[Kind, float] = {
    "straggler": 0.1,
    "communication-bound": 0.2,
    "pipeline-bound": 0.2,
    "input-bound": 0.2,
}
MIN_QUEUED_SHARE = 0.1  # of a step, without a core

NAMES: dict[Phase, str] = {
    "read": "dataset read",
    "augment": "augment",
    "to_device": "host to device",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "bubble": "pipeline bubble",
    "sync": "gradient sync",
    "optimizer": "optimizer",
    "record": "logging, checkpoint",
    "other": "other",
}
# Advice if the input limits a run; a task may replace it with its own options.
REMEDIES: Mapping[Phase, str] = {
    "read": "more cores per rank, smaller files, or data that fit on the device",
    "augment": "less of it",
    "to_device": "data that fit on the device, or larger batches",
}
_HELP: dict[Kind, str] = {
    "communication-bound": "a larger --accumulate-steps, --compression fp16, a larger --fusion-threshold-mb, or fewer "
    "hosts and faster links between them",
    "pipeline-bound": "a larger --accumulate-steps, --stages 0,B for stages that take alike, or fewer stages",
    "straggler": "a look at that host: other jobs, GPU clocks and temperature, cores per rank, its disk",
    "compute-bound": "--precision bf16, --compile, a smaller model, or more and faster devices",
}


@dataclass(frozen=True, kw_only=True)
class RankMeans(StepMeans):
    """The mean step of one rank."""

    rank: int
    host: str

    @property
    def sum_s(self) -> float:
        """The total seconds of all phases."""
        return sum(self.phases_s.values())

    @property
    def work_s(self) -> float:
        """The seconds of the rank's work, without the wait for other ranks."""
        return self.sum_s - self.phases_s["sync"] - self.phases_s["bubble"]

    def total_s(self, phases: Sequence[Phase]) -> float:
        """Return the total seconds of these phases."""
        return sum(self.phases_s[phase] for phase in phases)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The bottleneck of the run."""

    kind: Kind
    share: float  # of a step, 0 to 1
    rank: int | None  # of a straggler
    host: str | None
    sentence: str


def judge(ranks: Sequence[RankMeans], remedies: Mapping[Phase, str] = REMEDIES) -> Verdict:
    """Return what limits the run, and what would help; `remedies` are those of its input.

    A step ends on every rank at the same time, when the last rank's gradients have arrived. The slowest rank is the one
    with the most time outside `sync`. It does not wait for other ranks: its `sync` is the communication itself, and any
    longer `sync` of another rank is a wait for the slowest. A typical rank's step therefore has these shares:

    - straggler: the slowest rank's own time minus the median of the others' own time;
    - communication: the minimum `sync` of all ranks;
    - pipeline: the median of the others' `bubble`, the wait for other stages;
    - input: the median of the others' read, augment and to_device;
    - compute: the median of the others' forward, loss, backward and optimizer; record and other are the rest.

    The largest of the first four that reaches its MIN_SHARES is the verdict; if none does, the run is compute-bound.
    Means over many steps cannot distinguish communication from ranks that are slow in turn: both are waits in `sync`.
    With batch norm over all ranks the wait for a slow rank is in `forward`, and no straggler is detected.
    """
    slowest = max(ranks, key=lambda means: means.work_s)
    others = [means for means in ranks if means is not slowest] or [slowest]
    step_s = median(means.sum_s for means in ranks)
    waits: dict[Kind, float] = {
        "straggler": slowest.work_s - median(means.work_s for means in others),
        "communication-bound": min(means.phases_s["sync"] for means in ranks),
        "pipeline-bound": median(means.phases_s["bubble"] for means in others),
        "input-bound": median(means.total_s(INPUT) for means in others),
    }
    compute_s = median(means.total_s(COMPUTE) for means in others)
    worthwhile_s = {name: seconds for name, seconds in waits.items() if seconds >= MIN_SHARES[name] * step_s}
    kind: Kind = max(worthwhile_s, key=lambda name: worthwhile_s[name], default="compute-bound")
    share = {**waits, "compute-bound": compute_s}[kind] / step_s
    return Verdict(
        kind=kind,
        share=share,
        rank=slowest.rank if kind == "straggler" else None,
        host=slowest.host if kind == "straggler" else None,
        sentence=_sentence(kind, share, slowest, others, remedies) + waits_for_cores(ranks),
    )


def waits_for_cores(ranks: Sequence[RankMeans]) -> str:
    """Return what to add to a sentence about the rank that waits longest for a core; nothing if it is short."""
    longest = max(ranks, key=lambda means: means.queued_s)
    if longest.queued_s < MIN_QUEUED_SHARE * longest.sum_s:
        return ""
    share, place = longest.queued_s / longest.sum_s, f"rank {longest.rank} on {longest.host}"
    return f"; {place} waits {share:.0%} of each step for a core: end what else computes there, or start fewer ranks"


def _sentence(
    kind: Kind, share: float, slowest: RankMeans, others: Sequence[RankMeans], remedies: Mapping[Phase, str]
) -> str:
    usual_s = {phase: median(means.phases_s[phase] for means in others) for phase in PHASES}
    excess_s = {phase: slowest.phases_s[phase] - usual_s[phase] for phase in PHASES if phase not in ("sync", "bubble")}
    worst = max(excess_s, key=lambda phase: excess_s[phase])
    largest = max(INPUT, key=lambda phase: usual_s[phase])
    what: dict[Kind, str] = {
        "straggler": f"the others wait {share:.0%} of each step for rank {slowest.rank} on {slowest.host}, whose "
        f"{NAMES[worst]} takes {1000 * slowest.phases_s[worst]:.1f} ms against {1000 * usual_s[worst]:.1f} ms",
        "input-bound": f"{share:.0%} of each step goes into input, most of it {NAMES[largest]} "
        f"({1000 * usual_s[largest]:.1f} ms)",
        "pipeline-bound": f"{share:.0%} of each step stages wait for each other",
        "communication-bound": f"{share:.0%} of each step is spent on gradient sync",
        "compute-bound": f"{share:.0%} of each step is forward to optimizer",
    }
    return f"{kind}: {what[kind]}; what helps: {remedies[largest] if kind == 'input-bound' else _HELP[kind]}"
