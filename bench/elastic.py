"""Ranks that are lost: how soon the others go on in place, and what it costs that they can; after MPI=5 make setup.

    python bench/elastic.py recovery --n 20       from a kill to the next step, in place against a restart; 20 minutes
    python bench/elastic.py cost --n 20           a step with --elastic against one without; 15 minutes
    python bench/elastic.py goodput --n 1         a kill every 15 s, with growing and by restarts; 15 minutes
    python bench/elastic.py kills --n 200         one after the other, with growing: what the ranks hold that live on
    python bench/elastic.py accuracy --n 5        10 kills with growing against none, over so many seeds
    python bench/elastic.py tables                only what was measured before

Each measurement is added as a line to build/bench/elastic-<what>.jsonl, with the load of the machine at that time; the
table is of all its lines. To begin anew, remove the file. All runs train on the digits under `hvdlaunch run`, and ranks
are killed with kill -9 from outside.
"""

import argparse
import os
import random
import signal
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

from elastic_kills import MEASURE_KILLS, TABLES_OF_KILLS
from elastic_rank import STAGES
from elastic_runs import (
    BATCH,
    WARMUP_STEPS,
    Note,
    Noted,
    Sample,
    keep,
    kill,
    median_step_s,
    samples,
    spread,
    started,
    step_s,
)
from pairs import Table, middle, ratio

IN_PLACE, RESTART = "in place", "restart"
OPTIONS = {IN_PLACE: ["--elastic"], RESTART: ["--restarts", "1"]}
GOES_ON = {IN_PLACE: "closed", RESTART: "start"}  # what a process notes that goes on
CHECKPOINT_STEPS = 5
STRIKES_AT = (6, 25)  # a step of these
AFTERWARDS = 5  # steps that are watched, beyond that where the rank was killed

WITH, WITHOUT = "with --elastic", "without"
WINDOWS = 8  # in which one of the trainings works, and the other is stopped; of each in a round
WINDOW_STEPS = {"efficientnet_tiny": 30, "efficientnet_b0": 20}
SETTLING_STEPS = 3  # of a window, which are not counted
MEDIAN, MEAN, CORE = "by the median step", "by the mean step", "by the time of a core"


def recovery(model: str, way: str, draws: random.Random, *, ranks: int) -> Sample:
    """One rank is killed somewhere in a step: seconds until all have taken a step that they began after that."""
    rank, step, share = draws.randrange(ranks), draws.randint(*STRIKES_AT), draws.random()
    words = ["--checkpoint-every-steps", str(CHECKPOINT_STEPS)] if way == RESTART else []
    sample: Sample = {"model": model, "way": way, "ranks": ranks, "rank": rank}
    with started(model, ranks=ranks, options=OPTIONS[way], words=words) as job:
        pids = job.until(lambda: job.all_take(ranks, steps=step))
        sample |= {**job.load(), "step_s": median_step_s(job, pids)}
        time.sleep(share * sample["step_s"])
        killed_s = kill(next(pid for pid in pids if job.launched(pid) == rank))
        job.look()
        step = max(one["step"] for pid in pids for one in job.taken(pid) if one["at_s"] <= killed_s)

        def afterwards() -> dict[int, list[Note]] | None:
            """The steps of each process that goes on."""
            job.look()
            begun = {pid: job.noted(pid, GOES_ON[way], after_s=killed_s) for pid in job.notes}
            taken = {pid: job.taken(pid, after_s=one["at_s"]) for pid, one in begun.items() if one}
            enough = all(steps and steps[-1]["step"] > step + AFTERWARDS for steps in taken.values())
            return taken if enough and len(taken) == (ranks if way == RESTART else ranks - 1) else None

        try:
            taken = job.until(afterwards, within_s=60)
        except TimeoutError:
            return sample | {"step": step, "failed": [line.text for line in job.lines[-5:]]}
        status = job.leaves()
    return sample | {
        "step": step,
        "status": status,
        "on_again_s": max(steps[0]["at_s"] for steps in taken.values()) - killed_s,
        # A restart has to repeat steps.
        "as_far_s": max(next(one["at_s"] for one in steps if one["step"] > step) for steps in taken.values())
        - killed_s,
        "step_afterwards_s": statistics.median(one for steps in taken.values() for one in step_s(steps)),
        **(stages(job, taken, killed_s) if way == IN_PLACE else {}),
    }


def stages(job: Noted, taken: Mapping[int, list[Note]], killed_s: float) -> dict[str, float]:
    """Where the time of a recovery in place went: of the rank for which each stage was the longest."""
    spent: dict[str, float] = {}
    for pid, steps in taken.items():
        lost, closed = (job.noted(pid, what, after_s=killed_s) for what in ("lost", "closed"))
        assert lost
        assert closed
        own = {"until noticed": lost["at_s"] - killed_s, "all of it": closed["at_s"] - lost["at_s"]}
        own |= {"first step": steps[0]["at_s"] - closed["at_s"]}
        own |= {one["name"]: one["took_s"] for one in job.notes[pid] if one["what"] == "stage"}
        spent = {name: max(own[name], spent.get(name, 0.0)) for name in own}
    return {f"{name}_s": took_s for name, took_s in spent.items()}


def cost(model: str, *, ranks: int, first: str) -> Sample:
    """Two trainings at once, of which one is stopped while the other works, in turns: the seconds of their steps."""
    sides = {WITHOUT: [], WITH: ["--elastic"]} if first == WITHOUT else {WITH: ["--elastic"], WITHOUT: []}
    with ExitStack() as stack:
        jobs = {
            side: stack.enter_context(started(model, ranks=ranks, options=options)) for side, options in sides.items()
        }
        pids = {
            side: job.until(lambda job=job: job.all_take(ranks, steps=WARMUP_STEPS))  # type: ignore[misc]
            for side, job in jobs.items()
        }
        load = os.getloadavg()[0]
        for side in jobs:
            send(pids[side], signal.SIGSTOP)
        windows: dict[str, list[dict[str, float]]] = {side: [] for side in jobs}
        for number in range(WINDOWS):
            for side in list(jobs) if number % 2 == 0 else reversed(list(jobs)):
                windows[side].append(window(jobs[side], pids[side], WINDOW_STEPS[model]))
        for side, job in jobs.items():
            send(pids[side], signal.SIGCONT)
            job.leaves()
    return {"model": model, "ranks": ranks, "first": first, "load": load, "windows": windows}


def window(job: Noted, pids: Sequence[int], steps: int) -> dict[str, float]:
    """A training that is stopped takes so many steps: how long they are, and what they use of a core."""
    since_s = time.monotonic()
    send(pids, signal.SIGCONT)
    job.until(lambda: job.all_take(len(pids), steps=steps, after_s=since_s))
    send(pids, signal.SIGSTOP)
    job.look()
    taken = [job.taken(pid, after_s=since_s)[SETTLING_STEPS:] for pid in pids]
    spent, cores = step_s(taken[0]), [one for of_one in taken for one in step_s(of_one, "cpu_s")]
    return {
        "steps": len(spent),
        MEDIAN: statistics.median(spent),
        MEAN: statistics.fmean(spent),
        CORE: statistics.fmean(cores),
    }


def send(pids: Sequence[int], number: signal.Signals) -> None:
    for pid in pids:
        os.kill(pid, number)


def whole_pairs(found: Sequence[Sample]) -> list[tuple[Sample, Sample]]:
    """In place and restart of one round, where both went on."""
    rounds: dict[int, dict[str, Sample]] = {}
    for one in found:
        rounds.setdefault(one["round"], {})[one["way"]] = one
    pairs = [(both[IN_PLACE], both[RESTART]) for both in rounds.values() if len(both) == len(OPTIONS)]
    return [both for both in pairs if not any("failed" in one for one in both)]


def recovery_table() -> None:
    table = Table(
        name="elastic-recovery",
        question="Seconds from kill -9 of a random rank to the next step that all have taken, median (most); a restart "
        f"goes on from a checkpoint that is taken every {CHECKPOINT_STEPS} steps, and has to repeat some:",
        columns=["model", "n", "a step", IN_PLACE, RESTART, "until it is as far", "times as soon", "failed", "load"],
        about={"goal": "median <= 1 s, >= 5 times as soon"},
    )
    for model in BATCH:
        found = [one for one in samples("recovery") if one["model"] == model]
        pairs = whole_pairs(found)
        if not pairs:
            continue
        in_place, restart = zip(*pairs, strict=True)
        table.add(
            model=model,
            n=len(pairs),
            **{
                "a step": spread([one["step_s"] for one in in_place]),
                IN_PLACE: spread([one["on_again_s"] for one in in_place]),
                RESTART: spread([one["on_again_s"] for one in restart]),
                "until it is as far": spread([one["as_far_s"] for one in restart]),
                "times as soon": ratio([one["on_again_s"] for one in restart], [one["on_again_s"] for one in in_place]),
            },
            failed=sum("failed" in one for one in found),
            load=spread([one["load"] for one in in_place + restart]),
        )
    table.write()
    stages_table()


def stages_table() -> None:
    names = ["until noticed", "all of it", *STAGES, "first step"]
    table = Table(
        name="elastic-stages",
        question="Where the seconds of a recovery in place go, of the rank that took longest, median (most):",
        columns=["model", "n", *names],
    )
    for model in BATCH:
        found = [one for one in samples("recovery") if one["model"] == model and "until noticed_s" in one]
        if found:
            table.add(
                model=model, n=len(found), **{name: spread([one[f"{name}_s"] for one in found]) for name in names}
            )
    table.write()


def cost_table() -> None:
    table = Table(
        name="elastic-cost",
        question="A step with --elastic takes so many times as long as without, both over Open MPI 5, n windows:",
        columns=["model", "ranks", "launches", MEDIAN, MEAN, CORE, "a step, ms", "load"],
        about={"goal": "<= 1.01"},
    )
    found = samples("cost")
    for model, ranks in sorted({(one["model"], one["ranks"]) for one in found}):
        rounds = [one for one in found if (one["model"], one["ranks"]) == (model, ranks)]
        windows = {side: [window for one in rounds for window in one["windows"][side]] for side in (WITH, WITHOUT)}
        ratios = {
            way: ratio([one[way] for one in windows[WITH]], [one[way] for one in windows[WITHOUT]])
            for way in (MEDIAN, MEAN, CORE)
        }
        step_ms = middle([1000 * one[MEDIAN] for one in windows[WITHOUT]])
        load = spread([one["load"] for one in rounds])
        table.add(model=model, ranks=ranks, launches=len(rounds), **ratios, **{"a step, ms": step_ms}, load=load)
    table.write()


def measure_recovery(chosen: argparse.Namespace) -> None:
    before = len({one["round"] for one in samples("recovery")})
    for number in range(before, before + chosen.n):
        for model in chosen.models:
            for way in list(OPTIONS) if number % 2 == 0 else reversed(list(OPTIONS)):
                draws = random.Random(f"{number} {model}")  # noqa: S311 (the same for both)
                keep("recovery", {"round": number, **recovery(model, way, draws, ranks=chosen.np or 3)})


def measure_cost(chosen: argparse.Namespace) -> None:
    before = len(samples("cost"))
    for number in range(before, before + chosen.n):
        for model in chosen.models:
            first = WITHOUT if number % 2 == 0 else WITH
            keep("cost", cost(model, ranks=chosen.np or 2, first=first))


MEASURE: dict[str, Callable[[argparse.Namespace], None]] = {
    "recovery": measure_recovery,
    "cost": measure_cost,
    **MEASURE_KILLS,
}
TABLES: dict[str, Callable[[], None]] = {"recovery": recovery_table, "cost": cost_table, **TABLES_OF_KILLS}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("what", choices=[*MEASURE, "tables"])
    arguments.add_argument(
        "--n", type=int, default=20, help="measurements that are added, kills, or seeds; default: 20"
    )
    arguments.add_argument("--models", nargs="+", choices=list(BATCH), default=list(BATCH))
    arguments.add_argument("--np", type=int, help="ranks; default: 3, for cost 2")
    chosen = arguments.parse_args()
    if chosen.what in MEASURE:
        MEASURE[chosen.what](chosen)
    for what, table in TABLES.items():
        if chosen.what in (what, "tables") and samples(what):
            table()


if __name__ == "__main__":
    main()
