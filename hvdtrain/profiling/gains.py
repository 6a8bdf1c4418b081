"""What other ways to sum gradients would save at most, from measured seconds and bytes."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from hvdtrain.profiling.verdict import RankMeans

# Of a step that waits for gradients for less than this share, no other way is named.
LEAST_SHARE = 0.05
ROUND_STEPS = 16  # of --sync local, where it is named
ROUND_SENDS = 2  # times the gradients: parameters, and at least one thing that the optimizer remembers of each


@dataclass(frozen=True, kw_only=True)
class Summed:
    """What a rank sums with the others at each step, and how."""

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
        waits = f"{1000 * self.exposed_s:.1f} ms of {1000 * self.step_s:.1f} ms"
        ways = ", ".join(f"{one.by} {one.times_as_fast:.2f} times" for one in self.gains)
        return f"a step waits {waits} for {_mb(self.gradient_bytes)} MB of gradients{sent}; at most as fast: {ways}"

    def document(self) -> dict[str, Any]:
        """For phases.json."""
        return {**asdict(self), "sentence": self.sentence}


def _mb(count: float) -> str:
    return f"{count / 1e6:.1f}"


def gains_of(ranks: Sequence[RankMeans], summed: Summed) -> Gains | None:
    """What would help where ranks wait for gradients; None where they hardly do.

    What is exposed is the least `sync` of all ranks, as in a verdict, and nothing can save more than that. Bytes are in
    proportion to it: fp16 halves them. Between H hosts a host must send 2 (H - 1) / H of the gradients (Patarasuk and
    Yuan 2009, with hosts for ranks), and two levels send no more; what it does send depends on the ranks per host and
    on how MPI sums, so it is counted. Rounds send twice as much, once in k steps.
    """
    step_s = median(means.sum_s for means in ranks)
    exposed_s = min(means.phases_s["sync"] for means in ranks)
    hosts = len({means.host for means in ranks})
    counted = [means.sent_bytes for means in ranks if means.sent_bytes is not None]
    sent_bytes = max(counted) if hosts > 1 and len(counted) == len(ranks) else None
    saved_s: dict[str, float] = {}
    regroups = not summed.compression.startswith("powersgd")  # which --sync does not go with
    if summed.sync == "flat" and regroups and sent_bytes is not None:
        whole = 2 if summed.compression == "fp16" else 1  # groups send fp32 to each other
        needed_bytes = 2 * (hosts - 1) / hosts * summed.gradient_bytes * whole
        saved_s["--sync two-level"] = exposed_s * (1 - needed_bytes / sent_bytes)
    if summed.sync != "local" and regroups and hosts > 1:
        saved_s[f"--sync local --sync-every {ROUND_STEPS}"] = exposed_s * (1 - ROUND_SENDS / ROUND_STEPS)
    if summed.compression == "none" and summed.sync != "two-level":
        saved_s["--compression fp16"] = exposed_s / 2
    worth = {by: seconds for by, seconds in saved_s.items() if seconds >= LEAST_SHARE * step_s}
    if not worth:
        return None
    return Gains(
        step_s=step_s,
        exposed_s=exposed_s,
        gradient_bytes=summed.gradient_bytes,
        sent_bytes=sent_bytes,
        gains=[Gain(by=by, times_as_fast=step_s / (step_s - seconds)) for by, seconds in worth.items()],
    )
