"""Predictions of `hvdlaunch estimate` from 1 and 2 ranks of one host, compared with runs over two hosts.

Hosts are network namespaces with a link between them. Every rank has the same share of a core, in the calibrations and
in the predicted runs. Its quota has short periods, so that no rank is away for long, and its waits sleep, so that they
do not use up the quota. Both calibrations run at the same time as each predicted run, since the speed of the machine
changes with its load. A rank that computes alone uses up its quota in nearly every period; if it does not, other work
kept the ranks from their shares.
"""

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any

from bench import sides
from bench.jobs import HERE, job, run, two_hosts
from bench.pairs import Case, Table
from hvdtrain.ranks import waits
from launch.advice.estimate.hardware import CPU_INSIDE_GB_PER_S, Hardware, parse_link
from launch.advice.estimate.helps import ways_s
from launch.advice.estimate.step import BUCKET_BYTES, FIRST_BUCKET_BYTES, MeasuredSize, Workload, predict

BATCH = 16
PARAMETERS = 4_020_358  # of efficientnet_b0 with 10 classes
ROUND_STEPS = 16  # of --sync local
STEPS, WARMUP = 6, 2
CALIBRATION_STEPS = 20  # about as long as the predicted run
FLAT = "flat"
WAYS = ("--sync two-level", f"--sync local:{ROUND_STEPS}", "--compression powersgd:2")
GROUPS = "estimated-"  # names of the groups of processes
PERIOD_US = 20_000  # the kernel's 100 ms would keep a rank away for 50 ms, in which no other gets an answer
PATIENT = HERE.parent / "tests" / "mpi" / "start" / "patient.cpp"  # a yield of a core is a short sleep
PAUSE_S = 1e-3  # of that sleep: at 50 us a rank that waits still takes a tenth of a core
CYCLE_MS = 10  # of Horovod, each of which costs all ranks a message
LEAST_PERIODS = 50  # of a rank that counts
JOB = Workload(
    model="efficientnet_b0",
    unit="images",
    precision="fp32",
    batch_per_gpu=BATCH,
    gradient_bytes=4 * PARAMETERS,
    bucket_bytes=BUCKET_BYTES,
    first_bucket_bytes=FIRST_BUCKET_BYTES,
)


def limit(cores: float) -> None:
    """Limit all threads of this process to `cores`; the parent process removes the group."""
    root = Path(tempfile.mkdtemp())
    if ctypes.CDLL(None).mount(b"cgroup", str(root).encode(), b"cgroup", 0, b"cpu"):
        sys.exit("the controller cpu of cgroup v1 cannot be mounted")
    group = root / f"{GROUPS}{time.monotonic_ns()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(round(cores * PERIOD_US)))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def rank(out: Path, *, cores: float, **given: Any) -> None:
    """Run one of our ranks on `cores`."""
    limit(cores)
    waits.LOOK_EVERY_S = PAUSE_S
    sides.ours(out, **given)


@contextmanager
def sleeping_waits() -> Iterator[dict[str, str]]:
    """Yield the environment of ranks that sleep while MPI waits (it yields the core then, see bench/jobs.py)."""
    with tempfile.TemporaryDirectory(prefix="patient-") as folder:
        library = f"{folder}/patient.so"
        pause = f"-DPAUSE_NS={round(1e9 * PAUSE_S)}"
        run(["g++", "-shared", "-fPIC", "-O2", pause, "-o", library, str(PATIENT)])
        yield {"LD_PRELOAD": library, "HOROVOD_CYCLE_TIME": str(CYCLE_MS)}


def step_s(
    ranks: int, per_host: int, rate: str, way: str, *, steps: int, warmup: int, cores: float, env: dict[str, str]
) -> list[float]:
    """Return the times of steps; the ranks of the first host come first."""
    given: dict[str, Any] = {"model": JOB.model, "batch": BATCH, "steps": steps, "warmup": warmup, "cores": cores}
    with two_hosts(rate, per_host) as launch:
        launch[launch.index("-np") + 1] = str(ranks)
        words = [] if way == FLAT else way.split()
        answer = job(launch, "cases.estimated:rank", words=[*words, "--checkpoint-every", "0s"], env=env, **given)
    return list(answer["step_s"])


def measured_s(per_host: int, rate: str, way: str, **how: Any) -> tuple[float, dict[int, float]]:
    """Return the median step over two hosts (of rounds: their mean) and those of 1 and 2 ranks of one host."""
    is_local = "local" in way
    steps, warmup = (ROUND_STEPS, ROUND_STEPS) if is_local else (STEPS, WARMUP)
    with ThreadPoolExecutor() as pool:
        alone = {
            ranks: pool.submit(step_s, ranks, ranks, "none", FLAT, steps=CALIBRATION_STEPS, warmup=WARMUP, **how)
            for ranks in (1, 2)
        }
        found_s = pool.submit(step_s, 2 * per_host, per_host, rate, way, steps=steps, warmup=warmup, **how).result()
        calibrated = {ranks: statistics.median(one.result()) for ranks, one in alone.items()}
    return statistics.fmean(found_s) if is_local else statistics.median(found_s), calibrated


def remove_groups() -> list[float]:
    """Remove the groups of ended ranks; return the highest share of periods in which a rank used up its quota."""
    shares = []
    for group in Path("/sys/fs/cgroup/cpu").glob(f"{GROUPS}*"):
        found = dict(line.split() for line in (group / "cpu.stat").read_text().splitlines())
        if (periods := int(found["nr_periods"])) >= LEAST_PERIODS:
            shares.append(int(found["nr_throttled"]) / periods)
        group.rmdir()
    return [max(shares)] if shares else []


def predicted_s(per_host: int, rate: str, way: str, calibrated: dict[int, float], *, cores: float) -> float:
    """Return the model's prediction for two hosts from the steps of 1 and 2 ranks on one host."""
    hardware = Hardware(
        name=f"{cores:g} of a core each",
        gpus_per_host=per_host,
        inside_gb_per_s=CPU_INSIDE_GB_PER_S,
        link_gb_per_s=parse_link(rate),
        is_cpu=True,
        cores_per_rank=cores,
    )
    measured = tuple(
        MeasuredSize(
            gpus=ranks, per_host=ranks, samples_per_s=ranks * BATCH / seconds, source="the run at the same time"
        )
        for ranks, seconds in calibrated.items()
    )
    step = predict(JOB, hardware, measured, 2 * per_host)
    return {FLAT: step.step_s, **ways_s(JOB, hardware, step)}[way]


def estimated(chosen: argparse.Namespace) -> Table:
    """`hvdlaunch estimate` compared with runs on two hosts; as root, with iproute2, g++, cgroup v1; 12 minutes a round.

    Seven ranks run at a time: choose --cores so small that each of them always gets its share.
    """
    table = Table(
        name="estimated",
        question="A step of efficientnet_b0 over 2 hosts, predicted from 1 and 2 ranks of one host:",
        columns=["link", "hosts x ranks", "way", "1 rank ms", "2 ranks ms", "predicted ms", "measured ms", "error"],
    )
    errors, full = [], []
    with sleeping_waits() as env:
        for _, rate, per_host in product(range(chosen.rounds), chosen.rates, chosen.per_host):
            for way in (FLAT, *WAYS):
                found_s, calibrated = measured_s(per_host, rate, way, cores=chosen.cores, env=env)
                full += remove_groups()
                expected_s = predicted_s(per_host, rate, way, calibrated, cores=chosen.cores)
                errors.append(expected_s / found_s - 1)
                times_ms = (round(1000 * seconds) for seconds in (*calibrated.values(), expected_s, found_s))
                table.add(rate, f"2 x {per_host}", way, *times_ms, f"{errors[-1]:+.0%}")
    sizes = sorted(map(abs, errors))
    table.conditions = {
        "median error": f"{statistics.median(sizes):.0%}",
        "worst": f"{sizes[-1]:.0%}",
        "n": len(sizes),
        "cores of a rank": chosen.cores,
        "periods in which a rank alone used up its quota": f"{min(full):.0%}",
    }
    return table


OPTIONS = {"rounds": 1, "cores": 0.2, "rates": ["100mbit", "1gbit"], "per-host": [1, 2]}
CASES = {"estimated": Case(measure=estimated, options=OPTIONS)}
