"""What stages cost and save: memory, a limit of memory, idle time, and their speed beside replicas.

    python bench/pipeline.py                  all five, one after the other
    python bench/pipeline.py memory bubble    these
    python bench/pipeline.py replicas         on a machine that does nothing else

memory: the most of a rank, above what it held before there was a model: its stage with the optimizer's memory, and the
activations of a step; and the most when it is built. limit: a model that one process cannot train in
so much memory, and two stages can (cgroups of version 1, as root). bubble: stages that sleep, against the theory's
(S - 1) / (M + S - 1). replicas: two ranks as two stages against two replicas of the whole model, at the same global
batch and in turns, A B, B A, beside the most that M micro-batches allow: M / (M + S - 1) if stages are equally slow,
less with those of the cut. operations: what torch dispatches in a step, which does not depend on the machine's load.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pairs import HERE, Table, environment, in_turns, job, middle, mpirun, ratio

PROGRAM = str(HERE / "pipeline_rank.py")
GROUPS = Path("/sys/fs/cgroup/memory")
ENOUGH_MIB = 8192
CASES = ("bert_base", "efficientnet_b7")


def ranks(stages: int, what: str, *words: str, np: int | None = None) -> list[dict[str, Any]]:
    """What each rank has measured."""
    found: list[dict[str, Any]] = job(mpirun(np or stages), [PROGRAM, what, "--stages", str(stages), *words])["ranks"]
    return found


def memory() -> None:
    """Stages, recompute and the two schedules."""
    table = Table(
        name="pipeline_memory",
        question="The most memory of each rank above its start, MiB, 8 micro-batches of 2 (64 tokens; 64 x 64 pixels):",
        columns=["model", "stages", "cut at", "schedule", "recompute", "ranks", "most", "built"],
    )
    for model in CASES:
        for stages in (1, 2, 4):
            at: list[str] = []  # where the first of the runs is cut, so are the others
            for order in ("1f1b", "gpipe") if stages > 1 else ("1f1b",):
                for recompute in ([], ["--set", "recompute=True"]):
                    found = ranks(stages, "steps", "--model", model, "--steps", "1", "--order", order, *recompute, *at)
                    at = ["--at", found[0]["at"]] if stages > 1 else []
                    held, built = ([round(one[key]) for one in found] for key in ("above_start_mib", "built_mib"))
                    row = {"model": model, "stages": stages, "cut at": found[0]["at"], "schedule": order}
                    row |= {"recompute": "yes" if recompute else "no", "ranks": ", ".join(map(str, held))}
                    table.add(**row, most=max(held), built=", ".join(map(str, built)))
    table.write()


def limit() -> None:
    """One process and two stages, each rank in a cgroup of its own."""
    table = Table(
        name="pipeline_limit",
        question="bert_base with AdamW, 4 micro-batches of 2 with 32 tokens, each rank in so much memory:",
        columns=["stages", "limit MiB", "ended"],
    )
    if os.geteuid() or not (GROUPS / "cgroup.procs").is_file():
        sys.exit(f"no cgroups of memory can be made here ({GROUPS}, as root): nothing was measured")
    words = ["--model", "bert_base", "--micro-batches", "4", "--tokens", "32", "--steps", "1"]
    cut = ["--at", "6"]  # in the middle: where blocks are timed on a busy machine, memory may come out as it likes
    cases = {1: words, 2: [*words, *cut]}
    needed = [limited(stages, ENOUGH_MIB, given)[1] for stages, given in cases.items()]
    limit_mib = round(sum(needed) / 2)
    for stages, given in cases.items():
        status, _ = limited(stages, limit_mib, given)
        ended = "trained" if status == 0 else f"exit status {status}"
        table.add(**{"stages": stages, "limit MiB": limit_mib, "ended": ended})
    table.about = {"MiB charged to a rank without a limit": needed}
    table.write()


def limited(stages: int, limit_mib: int, words: list[str]) -> tuple[int, int]:
    """The exit status of a job whose ranks may each hold so much, and the most MiB that one was charged with."""
    groups = [GROUPS / f"hvdtrain-bench-{rank}" for rank in range(stages)]
    for group in groups:
        group.mkdir(exist_ok=True)
        (group / "memory.limit_in_bytes").write_text(str(limit_mib * 2**20))
        (group / "memory.max_usage_in_bytes").write_text("0")
    enter = f'echo $$ > {GROUPS}/hvdtrain-bench-$OMPI_COMM_WORLD_RANK/cgroup.procs; exec "$0" "$@"'
    try:
        with tempfile.TemporaryDirectory() as folder:
            program = [sys.executable, PROGRAM, f"{folder}/answer.json", "steps", "--stages", str(stages), *words]
            launch = [*mpirun(stages), "sh", "-c", enter, *program]
            status = subprocess.run(launch, env=environment(), stdout=subprocess.DEVNULL, check=False).returncode
            most = max(int((group / "memory.max_usage_in_bytes").read_text()) for group in groups)
            return status, round(most / 2**20)
    finally:
        for group in groups:
            group.rmdir()


def bubble() -> None:
    """Idle shares over all ranks and steps."""
    table = Table(
        name="pipeline_bubble",
        question="The idle share of stages that sleep 20 ms forward and 40 ms backward, in the mean over stages:",
        columns=["stages", "micro-batches", "theory", "1f1b", "gpipe"],
    )
    for stages in (2, 4):
        for count in (2, 4, 8, 16, 32):
            row: dict[str, Any] = {"stages": stages, "micro-batches": count}
            row["theory"] = round((stages - 1) / (count + stages - 1), 3)
            for order in ("1f1b", "gpipe"):
                if order == "1f1b" and count < stages:
                    row[order] = "as gpipe"
                    continue
                words = ["--micro-batches", str(count), "--order", order, "--steps", "5"]
                by_rank = [one["idle"] for one in ranks(stages, "sleep", *words)]
                row[order] = middle([sum(of_step) / stages for of_step in zip(*by_rank, strict=True)])
            table.add(**row)
    table.write()


def replicas(rounds: int) -> None:
    """Step by step in turns, the same samples."""
    table = Table(
        name="pipeline_replicas",
        question="Samples/s of 2 stages over those of 2 replicas, the same global batch in micro-batches of 2:",
        columns=[
            "model",
            "micro-batches",
            "stages / replicas",
            "M / (M + S - 1)",
            "bound of the cut",
            "of that bound",
        ],
        about={"rounds": rounds},
    )
    for model in ("bert_mini", "efficientnet_b0"):
        for count in (8, 32):
            words = ["--model", model, "--steps", "8"]
            sides = {
                "stages": partial(ranks, 2, "steps", *words, "--micro-batches", str(count)),
                "replicas": partial(ranks, 1, "steps", *words, "--micro-batches", str(count // 2), np=2),
            }
            found = in_turns(sides, rounds)
            steps_s = {side: [middle(of_ranks[0]["step_s"]).median for of_ranks in found[side]] for side in sides}
            speeds = [other / one for one, other in zip(steps_s["stages"], steps_s["replicas"], strict=True)]
            bounds = [bound_of_cut([one["busy_s"] for one in of_ranks], count) for of_ranks in found["stages"]]
            table.add(
                model=model,
                **{
                    "micro-batches": count,
                    "stages / replicas": middle(speeds),
                    "M / (M + S - 1)": round(count / (count + 1), 3),
                    "bound of the cut": middle(bounds),
                    "of that bound": ratio(speeds, bounds),
                },
            )
    table.write()


def bound_of_cut(busy_s: Sequence[float], count: int) -> float:
    """The most of the speed of as many replicas, for stages that compute so long in a step of `count` micro-batches.

    The slowest computes without a pause, but for the time that one micro-batch takes in the others.
    """
    step_s = max(busy_s) + (sum(busy_s) - max(busy_s)) / count
    return sum(busy_s) / len(busy_s) / step_s


def operations() -> None:
    """Of each rank, in one step of 8 micro-batches of 2 samples for each replica."""
    table = Table(
        name="pipeline_operations",
        question="Operations that torch dispatches in one step of 8 micro-batches, over those without stages:",
        columns=["model", "replicas", "settings", "without stages", "2 stages", "ratio"],
    )
    alone = ("", "precision=bf16", "recompute=True")
    pairs = ("", "compression=fp16", "compression=powersgd:2", "sync=two-level", "sync_bn=True")
    for model in ("bert_mini", "efficientnet_b0"):
        for replicas, of_settings in ((1, alone), (2, pairs)):
            for given in of_settings:
                if model.startswith("bert") and given.startswith("sync_bn"):
                    continue
                sets = [word for one in given.split() for word in ("--set", one)]
                sets += ["--set", "sync_group_size=1"] if given.startswith("sync=") else []
                words = ["--model", model, "--steps", "1", "--count", *sets]
                whole, cut = (
                    sum(one["operations"] for one in ranks(stages, "steps", *words, np=stages * replicas))
                    for stages in (1, 2)
                )
                row = {"without stages": f"{whole:,}", "2 stages": f"{cut:,}", "ratio": f"{cut / whole:.3f}"}
                table.add(model=model, replicas=replicas, settings=given or "-", **row)
    table.write()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", nargs="*", metavar="WHAT", help="memory, limit, bubble, replicas, operations")
    arguments.add_argument("--rounds", type=int, default=9, help="of replicas")
    chosen = arguments.parse_args()
    benches: dict[str, Callable[[], None]] = {"memory": memory, "limit": limit, "bubble": bubble}
    benches |= {"replicas": partial(replicas, chosen.rounds), "operations": operations}
    if unknown := set(chosen.what) - benches.keys():
        arguments.error(f"{min(unknown)} is none of {', '.join(benches)}")
    for name in chosen.what or benches:
        benches[name]()


if __name__ == "__main__":
    main()
