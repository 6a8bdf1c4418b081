"""Speed of sums on one host: our path of gradients compared with mpi4py and gloo, and over Horovod's Gloo.

Each job is `python -m hvdtrain.bandwidth` with one kind of sum, since Horovod's thread would take cores from others.
Goal: from 16 MB up, ours at least 0.9 times as fast as mpi4py's Allreduce. On GPUs only ours is measured.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from bench.jobs import mpirun, run
from bench.pairs import Case, Table, in_turns, middle, ratio

OURS = "ours"


def median_s(launch: Sequence[str], over: str, sizes: str, repeats: int) -> dict[int, float]:
    """Return the median seconds of one job, by bytes."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "report.json"
        words = ["--over", over, "--sizes", sizes, "--repeats", str(repeats), "--json", str(file)]
        run([*launch, sys.executable, "-m", "hvdtrain.bandwidth", *words])
        return {line["bytes"]: line["median_s"] for line in json.loads(file.read_text())["measured"]}


def all_reduce(chosen: argparse.Namespace) -> Table:
    """Sums of float32 on one host: the path of gradients compared with mpi4py's, gloo's and Horovod's Gloo."""
    ranks = chosen.np
    variants = {OURS: (mpirun(ranks), "ours")}
    if not torch.cuda.is_available():
        variants |= {"mpi4py": (mpirun(ranks), "mpi4py"), "torch.distributed gloo": (mpirun(ranks), "gloo")}
        variants["Horovod's Gloo"] = (["horovodrun", "--gloo", "-np", str(ranks)], "ours")
    turns = {name: partial(median_s, *one, chosen.sizes, chosen.repeats) for name, one in variants.items()}
    measured = in_turns(turns, chosen.rounds)
    table = Table(
        name="all-reduce",
        question=f"All-reduce in place of float32 on one host, {ranks} ranks; how many times as fast ours is:",
        columns=["bytes", "variant", "ms", "bus GB/s", "ours against it"],
        conditions={"sums per job": chosen.repeats},
    )
    for size in measured[OURS][0]:
        ours_s = [job[size] for job in measured[OURS]]
        for name, jobs in measured.items():
            theirs_s = [job[size] for job in jobs]
            middle_s = middle(theirs_s).median
            bus_gb_s = size / middle_s * 2 * (ranks - 1) / ranks / 1e9
            against = None if name == OURS else ratio(theirs_s, ours_s)
            table.add(size, name, f"{middle_s * 1e3:.3f}", f"{bus_gb_s:.3f}", against)
    return table


SIZES = "1KB,256KB,1MB,4MB,16MB,64MB,256MB"
CASES = {"all-reduce": Case(measure=all_reduce, options={"np": 2, "rounds": 7, "repeats": 20, "sizes": SIZES})}
