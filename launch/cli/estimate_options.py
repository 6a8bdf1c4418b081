"""The options of hvdlaunch estimate, and the checks of their values."""

import argparse
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from launch.advice.estimate import failures
from launch.advice.estimate.hardware import MACHINES, parse_link, parse_times
from launch.advice.estimate.sizes import CRITICAL, CriticalBatch
from launch.advice.estimate.step import OVERLAP
from launch.cli import values

T = TypeVar("T")


def add_options(estimate: argparse.ArgumentParser) -> None:
    """Add the options for what is known, the hardware, and what to predict."""
    estimate.add_argument("runs", nargs="*", type=Path, metavar="RUN", help="folders of runs that have ended")
    estimate.add_argument("--gpus", type=values.sizes, required=True, metavar="8,64", help="the sizes to predict")
    estimate.add_argument("--machine", choices=tuple(MACHINES), help="hosts of this kind; default: as --link says")
    estimate.add_argument(
        "--precision",
        choices=("fp32", "tf32", "fp16", "bf16"),
        help="of --measured, needed with it; default: the run's",
    )
    options: tuple[tuple[str, Callable[[str], object], str, str], ...] = (
        ("--dry-run", str, "FILE", "what python -m hvdtrain.effnet --dry-run json wrote; default: RUN"),
        ("--measured", _speeds, "N=V,...", "samples/s of a whole job of N GPUs; default: RUN"),
        ("--model", str, "NAME", "of --measured, needed with it: efficientnet_b4, bert_base; default: the run's"),
        ("--batch", values.count, "N", "of --measured, needed with it: samples per GPU and step; default: the run's"),
        ("--unit", _unit, "U/s", "of --measured; default: images/s"),
        ("--gpus-per-host", values.count, "N", "default: the machine's, or the runs'"),
        ("--link", _parsed(parse_link), "8x200gbit", "network per host and direction; default: the machine's"),
        ("--overlap", _share, "0-1", f"share of backward that hides sums; default: {OVERLAP:g}"),
        ("--allreduce", _parsed(parse_times), "1M=186us,1G=2760us", "measured sums; default: from links"),
        ("--epochs", _positive, "N", "to train; default: those of the run"),
        ("--samples-per-epoch", values.count, "N", "default: those of the run"),
        ("--price-per-gpu-hour", _positive, "PRICE", "in any currency; default: no cost"),
        ("--deadline", _hours, "12h", "print the fewest GPUs that meet it; default: none"),
        (
            "--critical-batch",
            _critical,
            "N|imagenet",
            f"or {' '.join(CRITICAL)}: as published; default: by the data",
        ),
        ("--csv", Path, "FILE", "also write a table; default: none"),
        ("--picture", Path, "FILE.svg", "also draw it; default: none"),
    )
    for option, kind, metavar, text in options:
        estimate.add_argument(option, type=kind, metavar=metavar, help=text)
    add_failures(estimate)
    estimate.add_argument("--json", action="store_true", help="for programs; default: Markdown")


def add_failures(command: argparse.ArgumentParser) -> None:
    """Add the options for the length of a job, the failure rate and the cost of failures."""
    rate, source = failures.FAILURES_PER_GPU_HOUR, "Meta's research clusters (HPCA 2025)"
    options = (
        ("--hours", None, "H", "of the job, for its failures; default: its epochs, or none"),
        ("--failures-per-gpu-hour", rate, "RATE", f"default: {rate:g}, of {source}"),
        (
            "--restart-s",
            failures.RESTART_S,
            "S",
            f"of a restart; default: {failures.RESTART_S:g}, of 3 ranks on CPUs",
        ),
        ("--save-s", None, "S", "a checkpoint holds the training; default: as measured"),
    )
    for option, default, metavar, text in options:
        command.add_argument(option, type=_positive, default=default, metavar=metavar, help=text)


def faults_of(options: argparse.Namespace) -> failures.FailureRates:
    """Return the values of the options of `add_failures`."""
    return failures.FailureRates(per_gpu_hour=options.failures_per_gpu_hour, restart_s=options.restart_s)


def _speeds(text: str) -> dict[int, float]:
    speeds = {}
    for word in text.split(","):
        found = re.fullmatch(r"([1-9][0-9]{0,6})=([0-9]{1,12}(?:\.[0-9]+)?)", word)
        if found is None or not float(found[2]):
            raise argparse.ArgumentTypeError(f"{word!r} is not GPUs=samples per second, such as 8=1223")
        if int(found[1]) in speeds:
            raise argparse.ArgumentTypeError(f"{found[1]} GPUs stand twice")
        speeds[int(found[1])] = float(found[2])
    return speeds


def _unit(text: str) -> str:
    if not re.fullmatch(r"[a-z]{1,20}/s", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a speed's unit, such as images/s")
    return text.removesuffix("/s")


def _parsed(parse: Callable[[str], T]) -> Callable[[str], T]:
    """Return the parser with ValueError turned into argparse's error."""

    def checked(text: str) -> T:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return checked


def _critical(text: str) -> CriticalBatch:
    return CRITICAL.get(text) or CriticalBatch(samples=_positive(text), source="--critical-batch")


def _share(text: str) -> float:
    number = _float(text)
    if not 0 <= number <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return number


def _positive(text: str) -> float:
    number = _float(text)
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return number


def _hours(text: str) -> float:
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]+)?)(min|h|d)", text)
    if found is None or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: write 90min, 12h or 3d")
    return float(found[1]) * {"min": 1 / 60, "h": 1.0, "d": 24.0}[found[2]]


def _float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
