"""Images/s of 2 ranks against 1, and of Horovod's fusion thresholds against its default.

    make bench                          (or: python bench/scaling.py --rounds 5)

Every round runs all variants one after the other, so that each ratio compares neighbours in time. Printed are the
median ratio over the rounds with its lowest and highest. One thread per rank in all of them.
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
FUSION_MB = (0, 1, 8, 32, 64)


def images_per_s(launch: list[str], *words: str) -> float:
    """Run bench/steps.py under a launcher; all ranks' images/s."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MPIEXEC_TIMEOUT": "300",
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }
        done = subprocess.run(
            [*launch, sys.executable, STEPS, str(out), *words], env=env, capture_output=True, text=True, check=False
        )
        if done.returncode != 0:
            sys.exit(done.stdout + done.stderr)
        return float(json.loads(out.read_text())["images_per_s"])


def report(name: str, ratios: list[float]) -> None:
    print(
        f"{name:<44} {statistics.median(ratios):.2f}  ({min(ratios):.2f} to {max(ratios):.2f}, n = {len(ratios)})",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batch", default="32")
    arguments.add_argument("--model", default="efficientnet_b0")
    chosen = arguments.parse_args()
    words = ["--model", chosen.model, "--batch", chosen.batch]
    variants = {
        "1 rank": (["mpirun", "-np", "1", "--bind-to", "none"], words),
        "mpirun, 2 ranks": (["mpirun", "-np", "2"], words),
        "mpirun --bind-to none, 2 ranks": (["mpirun", "-np", "2", "--bind-to", "none"], words),
        "horovodrun, 2 ranks": (["horovodrun", "-np", "2"], words),
        "horovodrun, 2 ranks, fp16 gradients": (["horovodrun", "-np", "2"], [*words, "--compression", "fp16"]),
    }
    for size in FUSION_MB:
        name = f"horovodrun, 2 ranks, fusion {size} MiB"
        variants[name] = (["horovodrun", "-np", "2"], [*words, "--fusion-threshold-mb", str(size)])
    measured: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(chosen.rounds):
        for name, (launch, arguments_of) in variants.items():
            measured[name].append(images_per_s(launch, *arguments_of))
    one = measured["1 rank"]
    print(
        f"{chosen.model}, synthetic 32x32, batch {chosen.batch} per rank; 1 rank: {statistics.median(one):.1f} images/s"
    )
    print("images/s against 1 rank:")
    for name in list(variants)[1:]:
        report(name, [many / alone for many, alone in zip(measured[name], one, strict=True)])


if __name__ == "__main__":
    main()
