"""Shared by all cases: variants in turn, their ratios with n and spread, and a table as JSON and Markdown.

Machines are shared and noisy, so only a ratio of consecutive measurements is a claim: each round runs all variants,
alternately forwards and backwards, and a ratio is taken within a round.
"""

import argparse
import json
import os
import platform
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

from hvdtrain.insight.compare.tables import TableColumn, to_markdown
from hvdtrain.insight.tracking.environment import versions

RESULTS = Path("build") / "bench"  # not under version control

Measured = TypeVar("Measured")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of n ratios within rounds."""

    median: float
    low: float  # of its 95 % interval, by the bootstrap; with fewer than 6 the minimum and the maximum
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g}, n = {self.n})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """Return the ratio of two variants, round by round."""
    return middle([one / other for one, other in zip(above, below, strict=True)])


def middle(values: Sequence[float]) -> Ratio:
    """Return the median of measurements, with its 95 % interval by the bootstrap."""
    draw = random.Random(0)  # noqa: S311 (a bootstrap, no secret)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return Ratio(median=statistics.median(values), low=medians[50], high=medians[1949], n=len(values))


def in_turns(variants: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """Return each variant's measurements in each round: A B, B A, A B, ..."""
    measured: dict[str, list[Measured]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants) if number % 2 == 0 else reversed(list(variants)):
            measured[name].append(variants[name]())
    return measured


@dataclass(kw_only=True)
class Table:
    """The answer of a case, which is written to build/bench/ as JSON and Markdown."""

    name: str
    question: str
    columns: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    conditions: dict[str, Any] = field(default_factory=dict)  # of the measurement
    holds: bool = True  # False if the case's claim is wrong

    def add(self, *cells: Any) -> None:
        """Add a row and print it: a cell for each column, None for an empty one; a Ratio keeps its n and spread."""
        self.rows.append(dict(zip(self.columns, cells, strict=True)))
        print("  ".join(f"{name}: {value}" for name, value in self.rows[-1].items()), flush=True)

    def markdown(self) -> str:
        """Return a table with the question above it and the machine below."""
        cells = {name: [row.get(name) for row in self.rows] for name in self.columns}
        columns = [
            TableColumn(title=name, texts=["-" if one is None else str(one) for one in cells[name]]) for name in cells
        ]
        conditions = ", ".join(f"{name} {value}" for name, value in {**machine(), **self.conditions}.items())
        return f"{self.question}\n\n{to_markdown(columns)}\n{conditions}\n"

    def write(self) -> None:
        """Write both files."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        rows = [
            {name: asdict(cell) if isinstance(cell, Ratio) else cell for name, cell in row.items()} for row in self.rows
        ]
        document = {"question": self.question, "machine": machine(), "about": self.conditions, "rows": rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(document, indent=2) + "\n")
        (RESULTS / f"{self.name}.md").write_text(self.markdown())


@dataclass(frozen=True, kw_only=True)
class Case:
    """A question that the harness answers; a file of bench/cases/ names its cases in CASES."""

    options: Mapping[str, Any]  # defaults by name, as bench/run.py reads them
    measure: Callable[[argparse.Namespace], Table]  # its docstring is the help, the first line is shown in the list


def machine() -> dict[str, Any]:
    """Return the machine of the measurements."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found = {"CPU": f"{len(os.sched_getaffinity(0))} cores of {cpu}", "GPUs": ", ".join(gpus) or "none"}
    return {**found, **{name: version for name, version in versions().items() if version is not None}}
