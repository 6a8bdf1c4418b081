"""What every bench shares: variants in turns within one run, their ratios with n and spread, as JSON and Markdown.

Machines are shared and noisy, so only a ratio of neighbours in time is a claim: round after round runs all variants,
alternately forwards and backwards, and a ratio is taken within a round.
"""

import json
import os
import platform
import random
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch

HERE = Path(__file__).parent.resolve()
RESULTS = Path("build") / "bench"  # not under version control
PATIENCE_S = 600

Measured = TypeVar("Measured")


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """The median of n ratios within rounds."""

    median: float
    low: float  # of its 95 % interval, by the bootstrap; of fewer than 6 the lowest and the highest
    high: float
    n: int

    def __str__(self) -> str:
        return f"{self.median:.3g} ({self.low:.3g} to {self.high:.3g}, n = {self.n})"


def ratio(above: Sequence[float], below: Sequence[float]) -> Ratio:
    """The ratio of two variants, round by round."""
    return middle([one / other for one, other in zip(above, below, strict=True)])


def middle(values: Sequence[float]) -> Ratio:
    """The median of measurements, with its 95 % interval by the bootstrap."""
    draw = random.Random(0)  # noqa: S311 (a bootstrap, no secret)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(2000))
    return Ratio(median=statistics.median(values), low=medians[50], high=medians[1949], n=len(values))


def in_turns(variants: Mapping[str, Callable[[], Measured]], rounds: int) -> dict[str, list[Measured]]:
    """What each variant measures in each round: A B, B A, A B, ..."""
    measured: dict[str, list[Measured]] = {name: [] for name in variants}
    for number in range(rounds):
        for name in list(variants) if number % 2 == 0 else reversed(list(variants)):
            measured[name].append(variants[name]())
    return measured


def job(launch: Sequence[str], program: Sequence[str], env: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What rank 0 of a job writes: `program` is a Python file and its words, its first word the file for the answer.

    One thread per rank unless OMP_NUM_THREADS says otherwise; ends the bench where the job fails.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "answer.json"
        words = [*launch, sys.executable, program[0], str(out), *program[1:]]
        done = subprocess.run(words, env={**environment(), **(env or {})}, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(words)}: exit status {done.returncode}")
        answer: dict[str, Any] = json.loads(out.read_text())
        return answer


def environment() -> dict[str, str]:
    """Of a job: one thread per rank, an end to every mpirun, root may start it, and the programs find each other."""
    return {
        "OMP_NUM_THREADS": "1",
        "MPIEXEC_TIMEOUT": str(PATIENCE_S),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent), os.environ.get("PYTHONPATH", "")]),
    }


def mpirun(ranks: int, *words: str) -> list[str]:
    """As a user would start them."""
    return ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(ranks), *words]


def torchrun(ranks: int) -> list[str]:
    """On this host's loopback alone, where others may have torchrun's own port; the interpreter must follow."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    address = f"--master-addr 127.0.0.1 --master-port {port}"
    return f"timeout {PATIENCE_S} torchrun --nnodes 1 --nproc-per-node {ranks} {address} --no-python".split()


@dataclass(kw_only=True)
class Table:
    """The answer of one bench: printed, and written to build/bench/ as JSON beside Markdown."""

    name: str
    question: str
    columns: Sequence[str]
    rows: list[dict[str, Any]] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)  # how it was measured

    def add(self, **cells: Any) -> None:
        """One row by column, shown at once; a Ratio keeps its n and spread."""
        self.rows.append(cells)
        print("  ".join(f"{name}: {value}" for name, value in cells.items()), flush=True)

    def markdown(self) -> str:
        """A table with the question above it and the machine below."""
        lines = [self.columns, ["---"] * len(self.columns)]
        lines += [[str(row.get(name, "-")) for name in self.columns] for row in self.rows]
        table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
        about = ", ".join(f"{name} {value}" for name, value in {**machine(), **self.about}.items())
        return f"{self.question}\n\n{table}\n\n{about}\n"

    def write(self) -> None:
        """Leave both files, and print the table."""
        RESULTS.mkdir(parents=True, exist_ok=True)
        rows = [
            {name: asdict(cell) if isinstance(cell, Ratio) else cell for name, cell in row.items()} for row in self.rows
        ]
        document = {"question": self.question, "machine": machine(), "about": self.about, "rows": rows}
        (RESULTS / f"{self.name}.json").write_text(json.dumps(document, indent=2) + "\n")
        (RESULTS / f"{self.name}.md").write_text(self.markdown())
        print(f"\n{self.markdown()}", flush=True)


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    return {
        "CPU": f"{len(os.sched_getaffinity(0))} cores of {cpu}",
        "GPUs": ", ".join(gpus) or "none",
        "Python": platform.python_version(),
        "torch": version("torch"),
        "Horovod": version("horovod"),
    }
