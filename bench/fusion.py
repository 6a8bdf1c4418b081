"""How gradients are best sent: fusion threshold, cycle time, groups and reducer, on whole steps of two models.

    python bench/fusion.py --rounds 5                          2 ranks; half an hour
    python bench/fusion.py --rounds 5 --models mlp --only bucket

Every round starts each variant once, in turns; a ratio is the time of a step against `horovod, 128 MiB, 1 ms` (Horovod
as it is) in the same round: below 1 is faster. Horovod's autotune runs beside them: its steps are timed after so many
more that it may have made up its mind.
"""

import argparse
from functools import partial
from pathlib import Path

from pairs import Table, in_turns, job, mpirun, ratio

STEPS = str(Path(__file__).with_name("timed_steps.py"))
MODELS = ("efficientnet_b0", "mlp")
FIRST = "horovod, 128 MiB, 1 ms"
THRESHOLDS_MB = (0, 8, 32, 64)
BUCKETS_MB = (1, 4, 8, 25, 64, 128)
CYCLES_MS = (0.5, 5, 10)
GROUPS = (1, 4)
AUTOTUNE = {"HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "1", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "5"}
AUTOTUNE_STEPS = 120  # Horovod takes 20 samples

Variant = tuple[list[str], dict[str, str]]  # words of timed_steps.py, and environment


def variants() -> dict[str, Variant]:
    """By name, the first one as it is without options."""
    horovod = "--set=reducer=horovod"
    found: dict[str, Variant] = {FIRST: ([horovod], {})}
    for size in THRESHOLDS_MB:
        found[f"horovod, {size} MiB"] = ([horovod, f"--set=fusion_threshold_mb={size}"], {})
    for cycle in CYCLES_MS:
        found[f"horovod, {cycle} ms"] = ([horovod, f"--set=cycle_time_ms={cycle}"], {})
    for groups in GROUPS:
        found[f"horovod, groups {groups}"] = ([horovod, f"--set=fusion_groups={groups}"], {})
    for size in BUCKETS_MB:
        found[f"bucket, {size} MiB"] = ([f"--set=fusion_threshold_mb={size}"], {})
    for cycle in CYCLES_MS:
        found[f"bucket, {cycle} ms"] = ([f"--set=cycle_time_ms={cycle}"], {})
    found["horovod, autotune"] = ([horovod, f"--warmup-steps={AUTOTUNE_STEPS}"], AUTOTUNE)
    return found


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
    chosen = arguments.parse_args()
    wanted = {name: one for name, one in variants().items() if name == FIRST or chosen.only in name}
    table = Table(
        name="fusion",
        question=f"Which way of sending gradients takes the shortest steps? {chosen.ranks} ranks, one thread each.",
        columns=["model", "variant", "step ms", f"time against {FIRST}"],
        about={"batch per rank": chosen.batch, "steps per job": chosen.steps},
    )
    for model in chosen.models:
        shared = ["--model", model, "--batch", chosen.batch, "--steps", chosen.steps]
        jobs = {
            name: partial(step_ms, chosen.ranks, [*shared, *words], environment)
            for name, (words, environment) in wanted.items()
        }
        measured = in_turns(jobs, chosen.rounds)
        for name, times in measured.items():
            against = ratio(times, measured[FIRST])
            row = {"model": model, "variant": name, "step ms": f"{sorted(times)[len(times) // 2]:.1f}"}
            table.add(**row, **{f"time against {FIRST}": against})
    table.write()


if __name__ == "__main__":
    main()
