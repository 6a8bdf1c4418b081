"""The sizes as Markdown for users, as JSON and CSV for programs, with all assumptions behind them."""

import csv
import io
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from launch.advice.estimate import step as model
from launch.advice.estimate.failures import Outlook
from launch.advice.estimate.hardware import Hardware
from launch.advice.estimate.helps import POWERSGD_SHARE
from launch.advice.estimate.inputs import Known
from launch.advice.estimate.sizes import Question, Size, save_s


def to_json(found: Sequence[Size], advice: Sequence[str], assumed: Sequence[str], known: Known) -> dict[str, Any]:
    """Return JSON for programs: `sizes`, `advice`, `assumptions`, and the measurements."""
    return {
        "estimate": 1,
        "model": known.job.model,
        "unit": f"{known.job.unit}/s",
        "measured": {str(one.gpus): one.samples_per_s for one in known.measured},
        "sizes": [_plain(size) for size in found],
        "advice": list(advice),
        "assumptions": list(assumed),
    }


def _plain(size: Size) -> dict[str, Any]:
    step = size.step
    return {
        **{name: value for name, value in asdict(size).items() if name != "step"},
        "samples_per_s": step.samples_per_s,
        "low": step.low,
        "high": step.high,
        "extrapolated": step.extrapolated,
        "step_s": step.step_s,
        "compute_s": step.compute_s,
        "exposed_communication_s": step.exposed_s,
        "negotiation_s": step.negotiation_s,
        "stragglers_s": step.stragglers_s,
        "all_reduce": {"algorithm": step.algorithm, "s": step.sums_s},
    }


def to_csv(found: Sequence[Size]) -> str:
    """Return one CSV line for each size, with the numbers of `to_json`; failures are separate columns."""
    rows = []
    for size in found:
        plain = _plain(size)
        plain["helps"] = "; ".join(f"{option} {times:.2f}" for option, times in size.helps.items())
        plain["all_reduce"] = size.step.algorithm
        failures = plain.pop("failures") or {}
        rows.append(plain | {f"failures_{name}" if name in plain else name: value for name, value in failures.items()})
    stream = io.StringIO()
    writer = csv.DictWriter(stream, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def to_markdown(found: Sequence[Size], advice: Sequence[str], assumed: Sequence[str], known: Known) -> str:
    """Return tables of speed and cost, of the step's parts and of failures; then advice and assumptions."""
    job = known.job
    measured = (f"{one.gpus} with {_speed(one.samples_per_s)} {job.unit}/s" for one in known.measured)
    speeds = ["GPUs", "hosts", f"{job.unit}/s", "range", "efficiency"]
    speeds += ["hours", "GPU-hours", "cost", "kWh", "fits", "note"]
    parts = ["GPUs", "step ms", "compute", "exposed sums", "negotiation", "stragglers", "all-reduce"]
    losses = ["GPUs", "hours", "odds", "interruptions", "save every s", "goodput"]
    helps = (
        f"- {size.gpus} GPUs, at most as fast: "
        + ", ".join(f"{option} {times:.2f} times" for option, times in size.helps.items())
        for size in found
        if size.helps
    )
    blocks = (
        f"{job.model}, {job.precision}, {job.batch_per_gpu} {job.unit} per GPU, from GPUs: {', '.join(measured)}",
        _table(speeds, [_speed_row(size) for size in found]),
        _table(parts, [_step_row(size.step) for size in found]),
        _table(losses, [_failure_row(size.gpus, size.failures) for size in found if size.failures is not None]),
        "\n".join(advice),
        "\n".join(helps),
        "\n".join(["Assumptions:", *(f"- {line}" for line in assumed)]),
    )
    return "\n\n".join(block for block in blocks if block)


def _number(value: float | None, form: str = ".3g") -> str:
    return "-" if value is None else format(value, form)


def _speed(value: float) -> str:
    return f"{float(f'{value:.4g}'):,g}" if value < 1e6 else f"{float(f'{value:.4g}'):,.0f}"


def _speed_row(size: Size) -> list[str]:
    step = size.step
    unfit = "no" if size.stages_to_fit is None else f"{size.stages_to_fit} stages"
    return [
        str(size.gpus),
        str(size.hosts),
        _speed(step.samples_per_s),
        f"{_speed(step.low)} to {_speed(step.high)}",
        _number(size.efficiency, ".0%"),
        *map(_number, (size.hours, size.gpu_hours, size.cost, size.energy_kwh)),
        {None: "-", True: "yes", False: unfit}[size.fits_memory],
        "extrapolated" if step.extrapolated else "",
    ]


def _step_row(step: model.PredictedStep) -> list[str]:
    parts = (step.step_s, step.compute_s, step.exposed_s, step.negotiation_s, step.stragglers_s)
    return [str(step.gpus), *(f"{1000 * part:.4g}" for part in parts), step.algorithm]


def _failure_row(gpus: int, one: Outlook) -> list[str]:
    return [
        str(gpus),
        _number(one.hours),
        _number(one.odds, ".1%"),
        _number(one.interruptions),
        _number(one.daly_s, ",.0f"),
        _number(one.goodput_restarts, ".1%"),
    ]


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table without columns that are empty in every row; empty without rows."""
    if not rows:
        return ""
    kept = [i for i in range(len(header)) if any(row[i] not in ("", "-") for row in rows)]
    lines = [
        [header[i] for i in kept],
        ["--:" if i < len(header) - 1 else "---" for i in kept],
        *([row[i] for i in kept] for row in rows),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def assumptions(known: Known, hardware: Hardware, question: Question) -> tuple[str, ...]:
    """Return the assumptions behind the numbers, each with its source."""
    job, faults, held_s = known.job, question.faults, save_s(known, question)
    link = "no link" if hardware.link_gb_per_s is None else f"link {hardware.link_gb_per_s:.3g} GB/s each way"
    sources = ", ".join(dict.fromkeys(one.source for one in known.measured))
    first = f", the first of {job.first_bucket_bytes / 2**20:.3g} MiB" if job.first_bucket_bytes else ""
    return (
        f"speed: from {sources}",
        f"hosts: {hardware.gpus_per_host} GPUs, {hardware.inside_gb_per_s:g} GB/s inside, {link} ({hardware.name})",
        f"gradients: {job.gradient_bytes / 1e6:.4g} MB in buckets of {job.bucket_bytes / 2**20:.3g} MiB{first}",
        f"hidden: sums travel during {job.overlap:.0%} of backward, which is {model.BACKWARD:.0%} of computation",
        f"stragglers: ranks deviate by {model.STRAGGLERS:.0%} of a step (fitted to 5 public tables)",
        f"range: {model.RANGE:.0%} each way holds all published rows; {model.UNCHECKED_RANGE:.0%} if `extrapolated`",
        f"failures: {faults.per_gpu_hour:g} per GPU-hour (default: Meta's research clusters, HPCA 2025)",
        f"stops: {faults.restart_s:g} s for a restart (default: 3 ranks on CPUs)",
        "saves: not measured, pass --save-s for intervals and goodput"
        if held_s is None
        else f"saves: training waits {held_s:.3g} s ({'measured' if question.save_s is None else '--save-s'})",
        *(["critical batch: not measured, pass --critical-batch"] if question.critical is None else []),
        f"powersgd:2: sends {POWERSGD_SHARE:.0%} of the gradients, as of efficientnet_b0 (docs: benchmarks)",
    )
