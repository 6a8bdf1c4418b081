"""Images/s of 2 ranks against 1, and with several fusion thresholds of Horovod.

    make bench                          (or: python bench/scaling.py --rounds 5)

Every round runs all variants one after the other, so that each ratio compares neighbours in time. It prints the
median ratio over the rounds, the lowest and the highest. Every rank has one thread.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = str(Path(__file__).with_name("steps.py"))
FUSION_MB = (0, 8, 32, 64)


def images_per_s(launch: list[str], words: list[str], jobs: int = 1) -> float:
    """Run bench/steps.py under a launcher, `jobs` times side by side; images/s of all ranks of all jobs."""
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MPIEXEC_TIMEOUT": "300",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    }
    with tempfile.TemporaryDirectory() as folder:
        outs = [Path(folder) / f"{job}.json" for job in range(jobs)]
        running = [
            subprocess.Popen([*launch, sys.executable, STEPS, str(out), *words], env=env, stdout=subprocess.DEVNULL)
            for out in outs
        ]
        statuses = [job.wait() for job in running]
        if any(statuses):
            sys.exit(f"{launch} {words} failed")
        return sum(float(json.loads(out.read_text())["images_per_s"]) for out in outs)


def report(name: str, ratios: list[float]) -> None:
    print(
        f"{name:<44} {statistics.median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f}, n = {len(ratios)})",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batch", default="64")
    arguments.add_argument("--model", default="efficientnet_b0")
    chosen = arguments.parse_args()
    words = ["--model", chosen.model, "--batch", chosen.batch]
    variants: dict[str, tuple[list[str], list[str], int]] = {
        "1 rank": (["mpirun", "-np", "1", "--bind-to", "none"], words, 1),
        "two jobs of 1 rank side by side": (["mpirun", "-np", "1", "--bind-to", "none"], words, 2),
        "mpirun, 2 ranks": (["mpirun", "-np", "2"], words, 1),
        "mpirun --bind-to none, 2 ranks": (["mpirun", "-np", "2", "--bind-to", "none"], words, 1),
        "horovodrun, 2 ranks": (["horovodrun", "-np", "2"], words, 1),
        "horovodrun, 2 ranks, fp16 gradients": (["horovodrun", "-np", "2"], [*words, "--compression", "fp16"], 1),
    }
    for size in FUSION_MB:
        name = f"horovodrun, 2 ranks, fusion {size} MiB"
        variants[name] = (["horovodrun", "-np", "2"], [*words, "--fusion-threshold-mb", str(size)], 1)
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(chosen.rounds):
        for name, variant in variants.items():
            measured[name].append(images_per_s(*variant))
    one_rank = measured["1 rank"]
    print(
        f"{chosen.model}, synthetic 32x32, batch {chosen.batch} per rank; "
        f"1 rank: {statistics.median(one_rank):.1f} images/s"
    )
    print("images/s against 1 rank:")
    for name in list(variants)[1:]:
        report(name, [several / alone for several, alone in zip(measured[name], one_rank, strict=True)])


if __name__ == "__main__":
    main()
