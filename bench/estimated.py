"""What `hvdlaunch estimate` predicts from 1 and 2 ranks of one host, against runs over two hosts.

    python bench/estimated.py [--rounds 1]      as root with iproute2 and cgroup v1; about 8 minutes a round

Hosts are network namespaces with a link of 100 Mbit/s or 1 Gbit/s; every rank has half a core, in calibration and in
what is predicted. Calibration and runs take turns; each prediction is from the calibration of its own round.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import two_hosts
from estimated_rank import BATCH, GROUPS, WARMUP_STEPS
from pairs import PATIENCE_S, environment

from launch.estimate.hardware import CPU_INSIDE_GB_PER_S, Hardware, parse_link
from launch.estimate.helps import ways_s
from launch.estimate.step import Job, Measured, predict
from launch.process import ask

BUCKET_BYTES = 8 << 20  # hvdtrain's on CPUs
PARAMETERS = 4_020_358  # of efficientnet_b0 with 10 classes
ROUND_STEPS = 16
WAYS = {
    "flat": [],
    "--sync two-level": ["--sync", "two-level"],
    f"--sync local --sync-every {ROUND_STEPS}": ["--sync", "local", "--sync-every", str(ROUND_STEPS)],
    "--compression powersgd:2": ["--compression", "powersgd:2"],
}
STEPS = 6
JOB = Job(
    model="efficientnet_b0",
    unit="images",
    precision="fp32",
    batch_per_gpu=BATCH,
    gradient_bytes=4 * PARAMETERS,
    bucket_bytes=BUCKET_BYTES,
)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Where ranks run."""

    hosts: int
    per_host: int
    rate: str = "none"


def step_s(shape: Shape, way: str, steps: int) -> float:
    """The median step after the warm-up; of rounds the mean of whole ones."""
    with tempfile.TemporaryDirectory(prefix="hosts-") as folder:
        agent, out = Path(folder) / "agent", Path(folder) / "out.json"
        agent.write_text(two_hosts._AGENT)
        agent.chmod(0o755)
        words = two_hosts.mpirun(shape.rate, shape.per_host, agent)
        ranks = shape.hosts * shape.per_host
        words[words.index("-np") + 1] = str(ranks)
        program = [sys.executable, str(Path(__file__).with_name("estimated_rank.py")), str(out), str(steps), *WAYS[way]]
        program += ["--epochs", "1", "--report-every-steps", "1", "--batch-size-per-rank", str(BATCH)]
        program += ["--checkpoint-every-s", "0", "--runs-dir", folder]
        answer = ask(["env", *_settings(folder), *words, *program], timeout_s=PATIENCE_S)
        for group in Path("/sys/fs/cgroup/cpu").glob(f"{GROUPS}*"):
            group.rmdir()
        if answer.status or not out.exists():
            sys.exit(f"{shape}, {way}: {answer.err[-2000:]}")
        marks: dict[int, float] = dict(json.loads(out.read_text()))
    first, last = WARMUP_STEPS, max(marks)
    if "local" in way:
        first = last - ROUND_STEPS
        return (marks[last] - marks[first]) / ROUND_STEPS
    return statistics.median(marks[step] - marks[step - 1] for step in range(first + 1, last + 1))


def _settings(folder: str) -> list[str]:
    return [f"{name}={value}" for name, value in {**environment(), "TMPDIR": folder}.items()]


def predicted_s(shape: Shape, way: str, calibrated: dict[int, float]) -> float:
    """What the model makes of the steps of 1 and 2 ranks on one host."""
    hardware = Hardware(
        name="half a core each",
        gpus_per_host=shape.per_host,
        inside_gb_per_s=CPU_INSIDE_GB_PER_S,
        link_gb_per_s=parse_link(shape.rate),
        is_cpu=True,
    )
    measured = tuple(
        Measured(gpus=ranks, per_host=ranks, samples_per_s=ranks * BATCH / seconds, source="this round")
        for ranks, seconds in calibrated.items()
    )
    step = predict(JOB, hardware, measured, shape.hosts * shape.per_host)
    return {"flat": step.step_s, **ways_s(JOB, hardware, step)}[way]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rates", nargs="+", default=["100mbit", "1gbit"])
    parser.add_argument("--per-host", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    chosen = parser.parse_args()
    if (reason := two_hosts.why_not()) is not None:
        print(f"skipped: {reason}")
        return
    print("| round | link | hosts x ranks | way | predicted ms | measured ms | error |\n|---|---|---|---|--:|--:|--:|")
    errors = []
    for number in range(chosen.rounds):
        calibrated = {ranks: step_s(Shape(hosts=1, per_host=ranks), "flat", STEPS) for ranks in (1, 2)}
        print(f"calibration: {', '.join(f'{1000 * seconds:.0f} ms' for seconds in calibrated.values())}", flush=True)
        for rate, per_host, way in product(chosen.rates, chosen.per_host, chosen.ways):
            shape = Shape(hosts=2, per_host=per_host, rate=rate)
            steps = ROUND_STEPS if "local" in way else STEPS
            expected_s, found_s = predicted_s(shape, way, calibrated), step_s(shape, way, steps)
            errors.append(expected_s / found_s - 1)
            row = (number, rate, f"2 x {per_host}", way, f"{1000 * expected_s:.0f}", f"{1000 * found_s:.0f}")
            print(f"| {' | '.join(map(str, row))} | {errors[-1]:+.0%} |", flush=True)
    sizes = sorted(map(abs, errors))
    print(f"median error {statistics.median(sizes):.0%}, worst {sizes[-1]:.0%}, n = {len(sizes)}")


if __name__ == "__main__":
    main()
