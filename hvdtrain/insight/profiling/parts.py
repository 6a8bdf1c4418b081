"""The isolated time of each part of a step, and its exposed time in an overlapped step."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, Literal

from hvdtrain.core.phases import COMPUTE, Phase
from hvdtrain.insight.profiling.verdict import REMEDIES, RankMeans

PARTS: dict[str, tuple[Phase, ...]] = {
    "read": ("read", "to_device"),
    "augment": ("augment",),
    "forward": ("forward",),
    "loss": ("loss",),
    "backward": ("backward",),
    "sync": ("sync", "bubble"),
    "optimizer": ("optimizer",),
    "record": ("record", "other"),
}
WAITING = "waiting"  # wait for gradients beyond the isolated time of their sum: for other ranks, or for cores
_SLOWDOWN = "computing slower than alone"
_REMEDIES = {  # for parts other than input
    **dict.fromkeys(("forward", "loss", "backward"), "--precision bf16, --compile, a smaller model"),
    "sync": "--accumulate-steps, --compression fp16, faster links",
    "optimizer": "a simpler --optimizer, no --clip-norm, --ema-epochs 0",
    "record": "a larger --report-every-steps and --checkpoint-every",
    WAITING: "ranks slow in turn: other jobs, fewer cores than ranks, the slowest host",
    _SLOWDOWN: "cores and bandwidth for what runs beside it: fewer ranks per host",
}

Outcome = Literal["nothing to do", "too noisy to tell", "to hide"]

# A step that exceeds its computation by at most this share of a step counts as equally long.
EQUAL_SHARE = 0.05
# A part with an isolated time below this share of a step has no `hidden`.
MIN_SHARE = 0.01


@dataclass(frozen=True, kw_only=True)
class PhaseShare:
    """One part of the mean step, over all ranks."""

    part: str
    isolated_s: float  # in isolation: pass B; own_s in phases.json
    exposed_s: float  # added to a step: pass A
    hidden: float | None  # 0 to 1, of its isolated time; None for work that cannot overlap, and below MIN_SHARE
    gain_at_most: float  # 0 to 1, of a step: saved if the part took no time
    remedy: str


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The whole step compared with its parts."""

    step_s: float  # pass A
    compute_s: float  # forward to optimizer without the sync, in isolation
    slowed_s: float  # additional computation time in pass A, caused by other work at the same time
    error_s: float | None  # standard error of step_s - compute_s; None if the run is too short to tell
    parts: list[PhaseShare]  # PARTS, and WAITING

    @property
    def outcome(self) -> Outcome:
        """Whether the step is as long as its computation."""
        excess_s = self.step_s - self.compute_s
        if excess_s <= EQUAL_SHARE * self.step_s:
            return "nothing to do"
        if self.error_s is None or excess_s <= 2 * self.error_s:
            return "too noisy to tell"
        return "to hide"

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        step = f"the whole step takes {_ms(self.step_s)} ms, forward to optimizer alone {_ms(self.compute_s)} ms"
        if self.outcome == "nothing to do":
            return f"nothing to do: {step}"
        if self.error_s is None:
            return f"too noisy to tell: {step}, in too few steps to know their spread: take more of them"
        if self.outcome == "too noisy to tell":
            spread = f"the difference is inside the spread over blocks of steps, {_ms(2 * self.error_s)} ms"
            return f"too noisy to tell: {step}, and {spread}: take more steps, or a machine with nothing else to do"
        gains = {part.part: part.gain_at_most for part in self.parts if part.part not in COMPUTE}
        gains[_SLOWDOWN] = self.slowed_s / self.step_s
        remedies = {part.part: part.remedy for part in self.parts} | {_SLOWDOWN: _REMEDIES[_SLOWDOWN]}
        largest = max(gains, key=lambda name: gains[name])
        share = 1 - self.compute_s / self.step_s
        return (
            f"{share:.0%} to hide: {step}; most of it is {largest}, at most {gains[largest]:.0%}: {remedies[largest]}"
        )

    def table(self) -> list[str]:
        """The lines of a Markdown table."""
        rows = [["part", "own ms", "exposed ms", "hidden", "to gain at most", "by"]]
        for part in self.parts:
            hidden = "-" if part.hidden is None else f"{part.hidden:.0%}"
            rows.append(
                [part.part, _ms(part.isolated_s), _ms(part.exposed_s), hidden, f"{part.gain_at_most:.1%}", part.remedy]
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        columns = list(zip(widths, _IS_TEXT, strict=True))
        rules = ["-" * width if is_text else f"{'-' * (width - 1)}:" for width, is_text in columns]
        return [_line(row, widths) for row in (rows[0], rules, *rows[1:])]

    def document(self) -> dict[str, Any]:
        """Return the comparison for phases.json."""
        return {
            "whole_step_s": self.step_s,
            "compute_alone_s": self.compute_s,
            "compute_slowed_s": self.slowed_s,
            "error_s": self.error_s,
            "outcome": self.outcome,
            "parts_sentence": self.sentence,
            "parts": [
                {"own_s" if name == "isolated_s" else name: value for name, value in asdict(part).items()}
                for part in self.parts
            ],
        }


_IS_TEXT = (True, False, False, False, False, True)  # other columns are numbers, aligned to the right


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f}"


def _line(texts: Iterable[str], widths: Iterable[int]) -> str:
    cells = zip(texts, widths, _IS_TEXT, strict=True)
    return f"| {' | '.join(text.ljust(width) if is_text else text.rjust(width) for text, width, is_text in cells)} |"


def compute_parts(ranks: Sequence[RankMeans], input_remedies: Mapping[Phase, str] = REMEDIES) -> Parts | None:
    """Return the parts of the mean step as medians over ranks; None unless all ranks have measured both passes.

    A rank that waits for gradients longer than their isolated sum takes is waiting for other ranks, or for a core. The
    exposed time of the sync is at most the minimum wait over ranks; the longest wait beyond that is WAITING.
    """
    isolated = [means.alone_s for means in ranks if means.alone_s is not None]
    if len(isolated) < len(ranks):
        return None
    overlapped = [means.phases_s for means in ranks]
    step_s = median(means.sum_s for means in ranks)
    isolated_s = {name: _median_over_ranks(isolated, phases) for name, phases in PARTS.items()}
    exposed_s = {name: _median_over_ranks(overlapped, phases) for name, phases in PARTS.items()}
    waits_s = [means_s["sync"] for means_s in overlapped]
    exposed_s["sync"] = min(isolated_s["sync"], *waits_s)
    isolated_s[WAITING], exposed_s[WAITING] = 0.0, max(waits_s) - exposed_s["sync"]
    compute_s = _median_over_ranks(isolated, COMPUTE)
    hideable = [name for name in ("read", "sync") if isolated_s[name] >= MIN_SHARE * step_s]
    remedies = _REMEDIES | {str(phase): remedy for phase, remedy in input_remedies.items()}
    errors_s = [means.error_s for means in ranks if means.error_s is not None]
    return Parts(
        step_s=step_s,
        compute_s=compute_s,
        slowed_s=max(0.0, _median_over_ranks(overlapped, COMPUTE) - compute_s),
        error_s=max(errors_s, default=None),
        parts=[
            PhaseShare(
                part=name,
                isolated_s=isolated_s[name],
                exposed_s=seconds,
                hidden=max(0.0, 1 - seconds / isolated_s[name]) if name in hideable else None,
                gain_at_most=seconds / step_s,
                remedy=remedies[name],
            )
            for name, seconds in exposed_s.items()
        ],
    )


def _median_over_ranks(ranks: Iterable[dict[Phase, float]], phases: Sequence[Phase]) -> float:
    return median(sum(of_rank[phase] for phase in phases) for of_rank in ranks)
