"""What hvdlaunch adds to the start of a run: `hvdlaunch run -np 2 -- true` against bare `mpirun -np 2 true`.

    python bench/start.py --rounds 30

Every round runs all three, alternately forwards and backwards, so that each pair compares neighbours in time.
Aims: at most 0.3 s more than mpirun, and hvdlaunch --help in less than 0.15 s.
"""

import argparse
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

HVDLAUNCH = str(Path(sys.executable).with_name("hvdlaunch"))
MPIRUN = ["mpirun", "--oversubscribe", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
RUN = [HVDLAUNCH, "run", *(["--allow-run-as-root"] if os.geteuid() == 0 else [])]
COMMANDS = {
    "mpirun -np 2 true": [*MPIRUN, "-np", "2", "true"],
    "hvdlaunch run -np 2 -- true": [*RUN, "-np", "2", "--", "true"],
    "hvdlaunch --help": [HVDLAUNCH, "--help"],
}


def seconds(command: list[str]) -> float:
    """From the start of a command to its end; it must succeed."""
    env = {**os.environ, "MPIEXEC_TIMEOUT": "60"}
    started = time.perf_counter()
    subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def report(name: str, values: list[float], unit: str) -> None:
    low, _, high = statistics.quantiles(values, n=4)
    print(
        f"{name:<44} {statistics.median(values):6.3f}{unit:<2}  half of them {low:.3f} to {high:.3f}, "
        f"all {min(values):.3f} to {max(values):.3f}, n = {len(values)}",
        flush=True,
    )


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=30)
    rounds: int = arguments.parse_args().rounds
    measured: dict[str, list[float]] = {name: [] for name in COMMANDS}
    for number in range(-1, rounds):
        for name in list(COMMANDS) if number % 2 else reversed(COMMANDS):
            took = seconds(COMMANDS[name])
            if number >= 0:  # the first round warms the file cache
                measured[name].append(took)
    for name, times in measured.items():
        report(name, times, " s")
    bare, ours = measured["mpirun -np 2 true"], measured["hvdlaunch run -np 2 -- true"]
    report("hvdlaunch run more than mpirun", [b - a for a, b in zip(bare, ours, strict=True)], " s")
    report("hvdlaunch run against mpirun", [b / a for a, b in zip(bare, ours, strict=True)], " x")


if __name__ == "__main__":
    main()
