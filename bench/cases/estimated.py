"""Predictions of `hvdlaunch estimate` from 1 and 2 ranks of one host, compared with runs over two hosts.

Hosts are network namespaces with a link between them; every rank has half a core, both in calibration and in the
predicted runs. Calibration and runs take turns; each prediction uses the calibration of its own round.
"""

import argparse
import ctypes
import os
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path
from typing import Any

from bench import sides
from bench.jobs import job, two_hosts
from bench.pairs import Case, Table
from launch.estimate.hardware import CPU_INSIDE_GB_PER_S, Hardware, parse_link
from launch.estimate.helps import ways_s
from launch.estimate.step import Job, Measured, predict

BATCH = 16
PARAMETERS = 4_020_358  # of efficientnet_b0 with 10 classes
ROUND_STEPS = 16  # of --sync local
STEPS = 6
FLAT = "flat"
WAYS = ("--sync two-level", f"--sync local --sync-every {ROUND_STEPS}", "--compression powersgd:2")
GROUPS = "estimated-"  # prefix of the control groups
QUOTA_US, PERIOD_US = 50_000, 100_000  # half a core
JOB = Job(
    model="efficientnet_b0",
    unit="images",
    precision="fp32",
    batch_per_gpu=BATCH,
    gradient_bytes=4 * PARAMETERS,
    bucket_bytes=8 << 20,  # hvdtrain's on CPUs
)


def limit() -> None:
    """Limit all threads of this process to half a core; the parent process removes the group."""
    root = Path(tempfile.mkdtemp())
    if ctypes.CDLL(None).mount(b"cgroup", str(root).encode(), b"cgroup", 0, b"cpu"):
        sys.exit("the controller cpu of cgroup v1 cannot be mounted")
    group = root / f"{GROUPS}{time.monotonic_ns()}"
    group.mkdir()
    (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
    (group / "cpu.cfs_quota_us").write_text(str(QUOTA_US))
    (group / "cgroup.procs").write_text(str(os.getpid()))


def rank(out: Path, **given: Any) -> None:
    """Run one of our ranks on half a core."""
    limit()
    sides.ours(out, **given)


def step_s(ranks: int, per_host: int, rate: str, way: str) -> float:
    """Return the median step of these ranks, those of the first host first; with rounds, the mean of a whole one."""
    is_local = "local" in way
    steps, warmup = (ROUND_STEPS, ROUND_STEPS) if is_local else (STEPS, 2)
    given: dict[str, Any] = {"model": JOB.model, "batch": BATCH, "steps": steps, "warmup": warmup}
    with two_hosts(rate, per_host) as launch:
        launch[launch.index("-np") + 1] = str(ranks)
        words = [] if way == FLAT else way.split()
        times_s = job(launch, "cases.estimated:rank", words=[*words, "--checkpoint-every-s", "0"], **given)["step_s"]
    for group in Path("/sys/fs/cgroup/cpu").glob(f"{GROUPS}*"):
        group.rmdir()
    return statistics.fmean(times_s) if is_local else statistics.median(times_s)


def predicted_s(per_host: int, rate: str, way: str, calibrated: dict[int, float]) -> float:
    """Return the model's prediction for two hosts from the steps of 1 and 2 ranks on one host."""
    hardware = Hardware(
        name="half a core each",
        gpus_per_host=per_host,
        inside_gb_per_s=CPU_INSIDE_GB_PER_S,
        link_gb_per_s=parse_link(rate),
        is_cpu=True,
    )
    measured = tuple(
        Measured(gpus=ranks, per_host=ranks, samples_per_s=ranks * BATCH / seconds, source="this round")
        for ranks, seconds in calibrated.items()
    )
    step = predict(JOB, hardware, measured, 2 * per_host)
    return {FLAT: step.step_s, **ways_s(JOB, hardware, step)}[way]


def estimated(chosen: argparse.Namespace) -> Table:
    """`hvdlaunch estimate` compared with runs on two hosts; as root, with iproute2, cgroup v1; 8 minutes a round."""
    table = Table(
        name="estimated",
        question="A step of efficientnet_b0 over 2 hosts, predicted from 1 and 2 ranks of one host:",
        columns=["round", "link", "hosts x ranks", "way", "predicted ms", "measured ms", "error"],
    )
    errors = []
    for number in range(chosen.rounds):
        calibrated = {ranks: step_s(ranks, ranks, "none", FLAT) for ranks in (1, 2)}
        for rate, per_host, way in product(chosen.rates, chosen.per_host, (FLAT, *WAYS)):
            expected_s = predicted_s(per_host, rate, way, calibrated)
            found_s = step_s(2 * per_host, per_host, rate, way)
            errors.append(expected_s / found_s - 1)
            figures = (round(1000 * expected_s), round(1000 * found_s), f"{errors[-1]:+.0%}")
            table.add(number, rate, f"2 x {per_host}", way, *figures)
    sizes = sorted(map(abs, errors))
    table.about = {"median error": f"{statistics.median(sizes):.0%}", "worst": f"{sizes[-1]:.0%}", "n": len(sizes)}
    return table


OPTIONS = {"rounds": 1, "rates": ["100mbit", "1gbit"], "per-host": [1, 2]}
CASES = {"estimated": Case(measure=estimated, options=OPTIONS)}
