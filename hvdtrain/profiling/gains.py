"""What other ways to all-reduce gradients would save at most, from measured seconds and bytes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdtrain.profiling.verdict import RankMeans

# If a step waits for gradients for less than this share, no other way is named.
MIN_SHARE = 0.05
ROUND_STEPS = 16  # of --sync local, where it is named
ROUND_SENDS = 2  # times the gradients: parameters, and at least one thing that the optimizer remembers of each


@dataclass(frozen=True, kw_only=True)
class SentGradients:
    """What a rank all-reduces at each step, and how."""

    gradient_bytes: int  # as they travel
    sync: str  # as --sync
    compression: str  # as --compression


@dataclass(frozen=True, kw_only=True)
class Gain:
    """A way to wait less for gradients."""

    by: str  # the option
    times_as_fast: float  # a step, at most


@dataclass(frozen=True, kw_only=True)
class Gains:
    """All that would help, against the step as it is."""

    step_s: float
    exposed_s: float  # that a step waits for gradients
    gradient_bytes: int
    sent_bytes: float | None  # by the host that sends most, per step
    gains: list[Gain]

    @property
    def sentence(self) -> str:
        """In words."""
        sent = "" if self.sent_bytes is None else f", {_mb(self.sent_bytes)} MB sent by a host"
        wait = f"{1000 * self.exposed_s:.1f} ms of {1000 * self.step_s:.1f} ms"
        ways = ", ".join(f"{gain.by} {gain.times_as_fast:.2f} times" for gain in self.gains)
        return f"a step waits {wait} for {_mb(self.gradient_bytes)} MB of gradients{sent}; at most as fast: {ways}"

    def document(self) -> dict[str, Any]:
        """For phases.json."""
        return {**asdict(self), "sentence": self.sentence}


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f}"


def compute_gains(ranks: Sequence[RankMeans], gradient_sync: SentGradients) -> Gains | None:
    """What would help if ranks wait for gradients; None if they hardly do.

    What is exposed is the least `sync` of all ranks, as in a verdict, and nothing can save more than that. Bytes are in
    proportion to it: fp16 halves them. Between H hosts a host must send 2 (H - 1) / H of the gradients (Patarasuk and
    Yuan 2009, with hosts for ranks), and two levels send no more; what it does send depends on the ranks per host and
    on how MPI sums, so it is counted. Rounds send twice as much, once in k steps.
    """
    step_s = median(means.sum_s for means in ranks)
    exposed_s = min(means.phases_s["sync"] for means in ranks)
    hosts = len({means.host for means in ranks})
    counts = [means.sent_bytes for means in ranks if means.sent_bytes is not None]
    sent_bytes = max(counts) if hosts > 1 and len(counts) == len(ranks) else None
    saved_s: dict[str, float] = {}
    can_regroup = not gradient_sync.compression.startswith("powersgd")  # which --sync does not go with
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
        gains=[Gain(by=option, times_as_fast=step_s / (step_s - seconds)) for option, seconds in worthwhile_s.items()],
    )
