"""Upper bounds for the gain of other ways to all-reduce gradients, from measured seconds and bytes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdtrain.profiling.verdict import RankMeans

# If the exposed share of a step is smaller than this, no alternative is proposed.
MIN_SHARE = 0.05
ROUND_STEPS = 16  # of --sync local, if it is proposed
ROUND_SENDS = 2  # times the gradients: parameters, and at least one optimizer state for each


@dataclass(frozen=True, kw_only=True)
class SentGradients:
    """The gradients that a rank all-reduces at each step, and how."""

    gradient_bytes: int  # as sent
    sync: str  # the value of --sync
    compression: str  # the value of --compression


@dataclass(frozen=True, kw_only=True)
class Gains:
    """All proposals, compared with the current step."""

    step_s: float
    exposed_s: float  # the part of a step that waits for gradients
    gradient_bytes: int
    sent_bytes: float | None  # by the host that sends most, per step
    times_as_fast: dict[str, float]  # upper bound for the speedup of a step, by the option

    @property
    def sentence(self) -> str:
        """The proposals in words."""
        sent = "" if self.sent_bytes is None else f", {_mb(self.sent_bytes)} MB sent by a host"
        wait = f"{1000 * self.exposed_s:.1f} ms of {1000 * self.step_s:.1f} ms"
        ways = ", ".join(f"{option} {times:.2f} times" for option, times in self.times_as_fast.items())
        return f"a step waits {wait} for {_mb(self.gradient_bytes)} MB of gradients{sent}; at most as fast: {ways}"

    def document(self) -> dict[str, Any]:
        """Return the proposals for phases.json."""
        document = {**asdict(self), "sentence": self.sentence}
        document["gains"] = [{"by": by, "times_as_fast": times} for by, times in document.pop("times_as_fast").items()]
        return document


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f}"


def compute_gains(ranks: Sequence[RankMeans], gradient_sync: SentGradients) -> Gains | None:
    """Return what would help if ranks wait for gradients; None if they hardly do.

    The exposed time is the minimum `sync` over ranks, as in a verdict, and no option can save more than that. It is
    assumed to be proportional to bytes: fp16 halves them. Between H hosts a host must send 2 (H - 1) / H of the
    gradients (Patarasuk and Yuan 2009, with hosts for ranks), and two-level sums send no more; the actual bytes depend
    on the ranks per host and on MPI's algorithm, so they are counted. Local rounds send twice as much, once in k steps.
    """
    step_s = median(means.sum_s for means in ranks)
    exposed_s = min(means.phases_s["sync"] for means in ranks)
    hosts = len({means.host for means in ranks})
    counts = [means.sent_bytes for means in ranks if means.sent_bytes is not None]
    sent_bytes = max(counts) if hosts > 1 and len(counts) == len(ranks) else None
    saved_s: dict[str, float] = {}
    can_regroup = gradient_sync.compression in ("none", "fp16")  # --sync sends the gradients themselves
    if gradient_sync.sync == "flat" and can_regroup and sent_bytes is not None:
        needed_bytes = 2 * (hosts - 1) / hosts * gradient_sync.gradient_bytes
        saved_s["--sync two-level"] = exposed_s * (1 - needed_bytes / sent_bytes)
    if gradient_sync.sync != "local" and can_regroup and hosts > 1:
        saved_s[f"--sync local --sync-every {ROUND_STEPS}"] = exposed_s * (1 - ROUND_SENDS / ROUND_STEPS)
    if gradient_sync.compression == "none":
        saved_s["--compression fp16"] = exposed_s / 2
    worthwhile_s = {option: seconds for option, seconds in saved_s.items() if seconds >= MIN_SHARE * step_s}
    if not worthwhile_s:
        return None
    return Gains(
        step_s=step_s,
        exposed_s=exposed_s,
        gradient_bytes=gradient_sync.gradient_bytes,
        sent_bytes=sent_bytes,
        times_as_fast={option: step_s / (step_s - seconds) for option, seconds in worthwhile_s.items()},
    )
