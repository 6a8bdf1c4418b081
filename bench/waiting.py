"""Waiting without stealing: what ranks that fill their cores lose by how they wait, alone and beside another job.

    python bench/waiting.py --rounds 5            on an idle machine
    python bench/waiting.py --rounds 5 --busy     beside one process that only computes, started and ended here

Every round starts each variant once, in turns; a ratio is the time of a step against `as it is` in the same round:
below 1 is faster. What may be changed: Open MPI spins or yields, the thread that waits for a sum asks all the time (as
Horovod does) or sleeps in between, Horovod's rounds are rarer, the sums go over Gloo, which sleeps in the kernel.
"""

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from pairs import Table, in_turns, job, mpirun, ratio

STEPS = str(Path(__file__).with_name("timed_steps.py"))
MODELS = ("efficientnet_b0", "mlp")
FIRST = "as it is"
# Both: with MPI's controller and Gloo's sums Horovod 0.28.1 dies of a segmentation fault.
GLOO = {"HOROVOD_CONTROLLER": "gloo", "HOROVOD_CPU_OPERATIONS": "gloo", "HOROVOD_GLOO_IFACE": "lo"}

Variant = tuple[list[str], dict[str, str]]  # words of timed_steps.py, and environment

VARIANTS: dict[str, Variant] = {
    FIRST: ([], {}),
    "Open MPI spins": (["--spin"], {}),
    "50 us between looks": (["--poll-us=50"], {}),
    "200 us between looks": (["--poll-us=200"], {}),
    "1000 us between looks": (["--poll-us=1000"], {}),
    "cycle 5 ms": (["--set=cycle_time_ms=5"], {}),
    "cycle 10 ms": (["--set=cycle_time_ms=10"], {}),
    "cycle 5 ms, 200 us": (["--set=cycle_time_ms=5", "--poll-us=200"], {}),
    "Horovod's reducer": (["--set=reducer=horovod"], {}),
    "Gloo": ([], GLOO),
    "Gloo, 200 us": (["--poll-us=200"], GLOO),
}


@contextlib.contextmanager
def one_busy_process() -> Iterator[None]:
    """A neighbour that takes one core's time, as long as this process lives."""
    neighbour = subprocess.Popen(
        [sys.executable, "-c", "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"]
    )
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.wait()


def step_ms(ranks: int, words: list[str], environment: dict[str, str]) -> float:
    return float(job(mpirun(ranks), [STEPS, *words], environment)["step_ms"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--ranks", type=int, default=2)
    arguments.add_argument("--batch", default="16", help="images per rank and step")
    arguments.add_argument("--steps", default="20", help="timed, of each job")
    arguments.add_argument("--models", nargs="+", default=MODELS)
    arguments.add_argument("--only", default="", help="variants with this in their names, besides the first")
    arguments.add_argument("--busy", action="store_true", help="beside a process that only computes")
    chosen = arguments.parse_args()
    beside = "one busy process" if chosen.busy else "nothing else"
    table = Table(
        name="waiting_busy" if chosen.busy else "waiting",
        question=f"How should {chosen.ranks} ranks wait for each other, beside {beside}?",
        columns=["model", "variant", "step ms", f"time against {FIRST}"],
        about={"batch per rank": chosen.batch, "steps per job": chosen.steps, "beside": beside},
    )
    wanted = {name: one for name, one in VARIANTS.items() if name == FIRST or chosen.only in name}
    for model in chosen.models:
        shared = ["--model", model, "--batch", chosen.batch, "--steps", chosen.steps]
        jobs = {
            name: partial(step_ms, chosen.ranks, [*shared, *words], environment)
            for name, (words, environment) in wanted.items()
        }
        with one_busy_process() if chosen.busy else contextlib.nullcontext():
            measured = in_turns(jobs, chosen.rounds)
        for name, times in measured.items():
            row = {"model": model, "variant": name, "step ms": f"{sorted(times)[len(times) // 2]:.1f}"}
            table.add(**row, **{f"time against {FIRST}": ratio(times, measured[FIRST])})
    table.write()


if __name__ == "__main__":
    main()
