"""What the ranks' clocks say together: which rank is slowest, what binds the run, and what would help."""

import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from hvdtrain.ranks.comm import Comm
from hvdtrain.timing.phases import PHASES, Phase, Phases

INPUT: tuple[Phase, ...] = ("read", "augment", "to_device")
COMPUTE: tuple[Phase, ...] = ("forward", "loss", "backward", "optimizer")

Kind = Literal["compute-bound", "input-bound", "communication-bound", "straggler"]

# From which share of a step it is worth a change. Doing away with a fifth makes training a quarter faster; a straggler
# costs all ranks its share, and looking at one host may mend it.
WORTH_A_CHANGE: dict[Kind, float] = {"straggler": 0.1, "communication-bound": 0.2, "input-bound": 0.2}

NAMES: dict[Phase, str] = {
    "read": "dataset read",
    "augment": "augment",
    "to_device": "host to device",
    "forward": "forward",
    "loss": "loss",
    "backward": "backward",
    "sync": "gradient sync",
    "optimizer": "optimizer",
    "record": "logging, checkpoint",
    "other": "other",
}
_HELP: dict[str, str] = {
    "read": "more cores per rank (they are its loader workers), smaller image files, or data that fit on the device",
    "augment": "leave out --cutout or set --no-augment",
    "to_device": "data that fit on the device, or more images per step",
    "communication-bound": "a larger --accumulate-steps, --compression fp16, a larger --fusion-threshold-mb, or fewer "
    "hosts and faster links between them",
    "straggler": "look at that host: other jobs, GPU clocks and temperature, cores per rank, its disk",
    "compute-bound": "--precision bf16, --compile, a smaller model, or more and faster devices",
}


@dataclass(frozen=True, kw_only=True)
class RankMeans:
    """One rank's mean step."""

    rank: int
    host: str
    steps: int
    step_s: float  # by the host's clock
    phases_s: dict[Phase, float]

    @property
    def sum_s(self) -> float:
        """All phases."""
        return sum(self.phases_s.values())

    @property
    def own_s(self) -> float:
        """What the rank does before it waits for the others."""
        return self.sum_s - self.phases_s["sync"]

    def of(self, phases: Sequence[Phase]) -> float:
        """Seconds in these phases together."""
        return sum(self.phases_s[phase] for phase in phases)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What binds the run."""

    kind: Kind
    share: float  # of a step, 0 to 1
    rank: int | None  # of a straggler
    host: str | None
    sentence: str


def judge(ranks: Sequence[RankMeans]) -> Verdict:
    """What binds the run, and what would help.

    A step is over for every rank at the same time, when the last one's gradients have come. So the slowest rank, the
    one with the most time outside `sync`, waits for nobody: what it waits is the communication itself, and what the
    others wait on top of that they wait for it. A typical rank's step is thus divided, as shares of the step, into

    - straggler: the slowest rank's own time less the median of the others' own time;
    - communication: the least `sync` of all ranks;
    - input: the median of the others' read, augment and to_device;
    - compute: the median of the others' forward, loss, backward and optimizer; record and other are the rest.

    The largest of the first three that is WORTH_A_CHANGE is the verdict; if none is, the run is compute-bound.
    Means over many steps cannot tell communication from ranks that are slow by turns: both wait in `sync`. With batch
    norm over all ranks the wait for a slow one is in `forward`, and no straggler is seen.
    """
    slowest = max(ranks, key=lambda one: one.own_s)
    others = [one for one in ranks if one is not slowest] or [slowest]
    step_s = median(one.sum_s for one in ranks)
    waits: dict[Kind, float] = {
        "straggler": slowest.own_s - median(one.own_s for one in others),
        "communication-bound": min(one.phases_s["sync"] for one in ranks),
        "input-bound": median(one.of(INPUT) for one in others),
    }
    compute_s = median(one.of(COMPUTE) for one in others)
    worth = {name: seconds for name, seconds in waits.items() if seconds >= WORTH_A_CHANGE[name] * step_s}
    kind: Kind = max(worth, key=lambda name: worth[name], default="compute-bound")
    share = {**waits, "compute-bound": compute_s}[kind] / step_s
    return Verdict(
        kind=kind,
        share=share,
        rank=slowest.rank if kind == "straggler" else None,
        host=slowest.host if kind == "straggler" else None,
        sentence=_sentence(kind, share, slowest, others),
    )


def _sentence(kind: Kind, share: float, slowest: RankMeans, others: Sequence[RankMeans]) -> str:
    usual = {phase: median(one.phases_s[phase] for one in others) for phase in PHASES}
    if kind == "straggler":
        more = {phase: slowest.phases_s[phase] - usual[phase] for phase in PHASES if phase != "sync"}
        where = max(more, key=lambda phase: more[phase])
        what = (
            f"the others wait {share:.0%} of each step for rank {slowest.rank} on {slowest.host}, whose {NAMES[where]} "
            f"takes {1000 * slowest.phases_s[where]:.1f} ms against {1000 * usual[where]:.1f} ms"
        )
        return f"straggler: {what}; {_HELP[kind]}"
    if kind == "input-bound":
        most = max(INPUT, key=lambda phase: usual[phase])
        what = f"{share:.0%} of each step goes into input, most of it {NAMES[most]} ({1000 * usual[most]:.1f} ms)"
        return f"input-bound: {what}; what helps: {_HELP[most]}"
    if kind == "communication-bound":
        return f"communication-bound: {share:.0%} of each step is spent on gradient sync; what helps: {_HELP[kind]}"
    rest_s = usual["record"] + usual["other"]
    rest = rest_s / sum(usual.values())
    remark = f"; logging, checkpoints and checks take {rest:.0%}: have fewer of them" if rest >= 0.2 else ""
    return f"compute-bound: {share:.0%} of each step is forward to optimizer{remark}; what helps: {_HELP[kind]}"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The mean step of every rank, and what it means."""

    ranks: list[RankMeans]
    verdict: Verdict

    def summary(self) -> dict[str, Any]:
        """The verdict, for result.json."""
        found = self.verdict
        return {
            "verdict": found.kind,
            "share": found.share,
            "rank": found.rank,
            "host": found.host,
            "sentence": found.sentence,
        }

    def document(self) -> dict[str, Any]:
        """For phases.json: over ranks the least, the median and the most of each phase, then each rank's own."""
        slowest = max(self.ranks, key=lambda one: one.own_s)
        phases = {}
        for phase in PHASES:
            seconds = [one.phases_s[phase] for one in self.ranks]
            most = max(self.ranks, key=lambda one: one.phases_s[phase])
            phases[phase] = {
                "min_s": min(seconds),
                "median_s": median(seconds),
                "max_s": most.phases_s[phase],
                "max_rank": most.rank,
                "max_host": most.host,
            }
        return {
            **self.summary(),
            "steps": self.ranks[0].steps,
            "step_s": median(one.step_s for one in self.ranks),
            "slowest": {"rank": slowest.rank, "host": slowest.host, "own_s": slowest.own_s},
            "phases": phases,
            "ranks": [{**asdict(one), "sum_s": one.sum_s} for one in self.ranks],
        }


def over_ranks(comm: Comm, phases: Phases) -> Profile | None:
    """What all ranks have measured; None where their clocks are off or still warming up. Called by every rank."""
    means = phases.means()
    if means is None:
        return None
    own = {"rank": comm.rank, "host": socket.gethostname(), **asdict(means)}
    ranks = [RankMeans(**one) for one in comm.gather(own)]
    return Profile(ranks=ranks, verdict=judge(ranks))
