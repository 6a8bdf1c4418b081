"""Samples/s of 2 ranks against 1, by launcher.

    python bench/scaling.py --rounds 5

Two jobs of one rank side by side, which say nothing to each other, show what the machine itself gives.
"""

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from pairs import HERE, Table, in_turns, job, mpirun, ratio


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--batch", default="64")
    arguments.add_argument("--model", default="efficientnet_b0")
    arguments.add_argument("--steps", default="12")
    chosen = arguments.parse_args()
    program = [str(HERE / "ours.py"), "--model", chosen.model, "--batch", chosen.batch, "--steps", chosen.steps]

    def speed(launch: Sequence[str], ranks: int, *settings: str) -> float:
        step_s: list[float] = job(launch, [*program, *(f"--set={one}" for one in settings)])["step_s"]
        return ranks * int(chosen.batch) / statistics.median(step_s)

    def side_by_side() -> float:
        with ThreadPoolExecutor(2) as jobs:
            return sum(jobs.map(lambda _: speed(mpirun(1), 1), range(2)))

    by_horovodrun = partial(speed, ["horovodrun", "-np", "2"], 2)
    variants: dict[str, Callable[[], float]] = {
        "1 rank": partial(speed, mpirun(1), 1),
        "two jobs of 1 rank side by side": side_by_side,
        "mpirun, 2 ranks": partial(speed, ["mpirun", "-np", "2"], 2),
        "mpirun --bind-to none, 2 ranks": partial(speed, mpirun(2), 2),
        "horovodrun, 2 ranks": by_horovodrun,
        "horovodrun, 2 ranks, fp16 gradients": partial(by_horovodrun, "compression=fp16"),
    }
    speeds = in_turns(variants, chosen.rounds)
    write(speeds, f"{chosen.model}, batch {chosen.batch} per rank: samples/s against 1 rank:")


def write(speeds: Mapping[str, Sequence[float]], question: str) -> None:
    alone = speeds["1 rank"]
    table = Table(name="scaling", question=question, columns=["variant", "against 1 rank"])
    table.about["samples/s of 1 rank"] = round(statistics.median(alone), 1)
    for name, of_variant in speeds.items():
        table.add(**{"variant": name, "against 1 rank": ratio(of_variant, alone)})
    table.write()


if __name__ == "__main__":
    main()
