"""Many kills of one training, whose lost ranks are replaced, for elastic.py: goodput, what leaks, and the accuracy."""

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
from elastic_runs import WARMUP_STEPS, Noted, Sample, keep, kill, samples, spread, started
from pairs import Table, middle

MODEL = "efficientnet_tiny"
GROWING, RESTARTS = "growing", "restarts"
OPTIONS = {GROWING: ["--elastic", "--grow"], RESTARTS: ["--restarts", "1000"]}
WORDS = {GROWING: [], RESTARTS: ["--checkpoint-every-steps", "10"]}

EVERY_S = 15.0  # between kills
KILLED_S = 300.0
QUIET_S = 60.0

HELD = ["resident_mib", "descriptors", "threads", "mappings"]
SETTLING_KILLS = 20  # which are not counted

EPOCHS = 120
KILLS = 10


def images_per_s(way: str, *, ranks: int, seconds: float, draws: random.Random | None = None) -> Sample:
    """Training images that are completed in a second; with `draws` one rank is killed every EVERY_S."""
    with started(MODEL, ranks=ranks, options=OPTIONS[way], words=WORDS[way]) as job:
        job.until(lambda: job.all_take(ranks, steps=WARMUP_STEPS))
        load, began_s, kills = job.load(), time.monotonic(), 0
        while time.monotonic() < began_s + seconds:
            time.sleep(0.02)
            next_s = (kills + 1) * EVERY_S
            if draws is None or next_s >= seconds or time.monotonic() < began_s + next_s:
                continue
            if victims := job.training() or job.alive():
                kill(draws.choice(sorted(victims)))
                kills += 1
        job.look()
        images = job.images(before_s=began_s + seconds) - job.images(before_s=began_s)
        left = len(job.training())
        ended_s = time.monotonic()
        job.until(lambda: any(job.taken(pid, after_s=ended_s) for pid in job.training()))  # not while it restarts
        status = job.leaves()
    return {"images_per_s": images / seconds, "kills": kills, "ranks_at_the_end": left, "status": status, **load}


def measure_goodput(chosen: argparse.Namespace) -> None:
    before = len(samples("goodput")) // len(OPTIONS)
    for number in range(before, before + chosen.n):
        for way in OPTIONS:
            ranks, draws = chosen.np or 3, random.Random(number)  # noqa: S311 (who is killed)
            quiet = [images_per_s(way, ranks=ranks, seconds=QUIET_S)]
            killed = images_per_s(way, ranks=ranks, seconds=KILLED_S, draws=draws)
            quiet += [images_per_s(way, ranks=ranks, seconds=QUIET_S)]
            keep("goodput", {"way": way, "ranks": ranks, "killed": killed, "quiet": quiet})


def goodput_table() -> None:
    kills, undisturbed = "kills", "images/s undisturbed, before and after"
    table = Table(
        name="elastic-goodput",
        question=f"{MODEL}: images that are completed per second with a kill of a random rank every {EVERY_S:g} s for "
        f"{KILLED_S:g} s, each counted once, against the same run undisturbed for {QUIET_S:g} s before and after:",
        columns=["lost ranks", "n", "ranks", kills, "images/s", undisturbed, "goodput", "load"],
        about={"goal": ">= 80 %"},
    )
    for way in OPTIONS:
        found = [one for one in samples("goodput") if one["way"] == way]
        if not found:
            continue
        rates = [one["killed"]["images_per_s"] for one in found]
        quiet = [[one["images_per_s"] for one in both["quiet"]] for both in found]
        shares = [rate / statistics.fmean(both) for rate, both in zip(rates, quiet, strict=True)]
        table.add(
            **{"lost ranks": way, "n": len(found), "ranks": found[0]["ranks"]},
            **{kills: "; ".join(str(one["killed"]["kills"]) for one in found)},
            **{"images/s": "; ".join(f"{rate:.0f}" for rate in rates)},
            **{undisturbed: "; ".join(" and ".join(f"{rate:.0f}" for rate in both) for both in quiet)},
            goodput="; ".join(f"{share:.0%}" for share in shares),
            load=spread([one["killed"]["load"] for one in found]),
        )
    table.write()


def held(pid: int) -> dict[str, float]:
    """What a process holds."""
    process = psutil.Process(pid)
    return {
        "resident_mib": process.memory_info().rss / 2**20,
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "mappings": len(Path(f"/proc/{pid}/maps").read_text().splitlines()),
    }


def launchers(job: Noted) -> dict[str, int]:
    """Hvdlaunch and mpirun, by process."""
    found = {"hvdlaunch": job.process.pid}
    for process in job.left():
        with suppress(psutil.Error, IndexError):
            if Path(process.cmdline()[0]).name in ("mpirun", "prterun"):
                found["mpirun"] = process.pid
    return found


def measure_kills(chosen: argparse.Namespace) -> None:
    """One rank lives through all kills; each comes once there are as many ranks as before."""
    ranks, run = chosen.np or 3, time.strftime("%F %T")
    draws = random.Random(run)  # noqa: S311 (who is killed)
    with started(MODEL, ranks=ranks, options=OPTIONS[GROWING], words=["--checkpoint-every-steps", "50"]) as job:
        pids = job.until(lambda: job.all_take(ranks, steps=WARMUP_STEPS))
        spared = draws.choice(pids)
        watched = {"the rank that is spared": spared, **launchers(job)}
        struck_s = time.monotonic()
        for number in range(chosen.n + 1):
            pids = job.until(lambda since=struck_s: job.all_take(ranks, steps=2, after_s=since))  # type: ignore[misc]
            sample: Sample = {"run": run, "kills": number, "grown_back_s": time.monotonic() - struck_s, **job.load()}
            keep("kills", sample | {"held": {name: held(pid) for name, pid in watched.items()}})
            time.sleep(draws.uniform(0.0, 1.0))
            if number < chosen.n:
                struck_s = kill(draws.choice([pid for pid in pids if pid != spared]))
        status = job.leaves()  # with a checkpoint, for which replicas must be equal
        result = job.result()
    ended = {name: result[name] for name in ("exit_reason", "lost_ranks", "recoveries")}
    keep("kills", {"run": run, "status": status, **ended})


def slope(kills: Sequence[float], values: Sequence[float]) -> float:
    """Per 100 kills."""
    return 100 * statistics.linear_regression(kills, values).slope


def kills_table() -> None:
    found = samples("kills")
    run = found[-1]["run"]
    ended = [one["status"] for one in found if one["run"] == run and "status" in one]
    counted = [one for one in found if one["run"] == run and "held" in one]
    later = [one for one in counted if one["kills"] >= SETTLING_KILLS] if len(counted) > 2 * SETTLING_KILLS else counted
    table = Table(
        name="elastic-kills",
        question=f"{MODEL}: {counted[-1]['kills']} kills one after the other, lost ranks replaced each time; what "
        f"processes hold that live on, from kill {later[0]['kills']} on:",
        columns=["process", "holds", "first", "last", "most", "per 100 kills"],
        about={
            "replicas at the end": "equal" if ended == [0] else f"not known to be equal: exit status {ended}",
            "s until grown back": spread([one["grown_back_s"] for one in later]),
            "load": spread([one["load"] for one in later]),
        },
    )
    for process in counted[0]["held"]:
        for what in HELD:
            values = [one["held"][process][what] for one in later]
            table.add(
                process=process,
                holds=what,
                first=f"{values[0]:.0f}",
                last=f"{values[-1]:.0f}",
                most=f"{max(values):.0f}",
                **{"per 100 kills": slope_with_interval([one["kills"] for one in later], values)},
            )
    table.write()


def slope_with_interval(kills: Sequence[float], values: Sequence[float]) -> str:
    """With its 95 % interval by the bootstrap over kills."""
    if len(set(kills)) < 3:
        return "-"
    draw, places, slopes = random.Random(0), range(len(kills)), list[float]()  # noqa: S311 (a bootstrap, no secret)
    while len(slopes) < 1000:
        some = draw.choices(places, k=len(kills))
        if len(set(some)) > 1:
            slopes.append(slope([kills[place] for place in some], [values[place] for place in some]))
    slopes.sort()
    return f"{slope(kills, values):.2f} ({slopes[25]:.2f} to {slopes[974]:.2f}, n = {len(kills)})"


def accuracy(seed: int, *, kills: int, ranks: int) -> Sample:
    """The test accuracy of a whole run, of which ranks are killed at random places of its first nine tenths."""
    draws = random.Random(seed)  # noqa: S311 (who is killed, and when)
    places = sorted(draws.uniform(0.0, 0.9) for _ in range(kills))  # shares of the run
    words = ["--epochs", str(EPOCHS), "--seed", str(seed)]
    done = 0
    options = [*OPTIONS[GROWING], "--restarts", str(KILLS)]  # where they cannot go on in place
    with started(MODEL, ranks=ranks, options=options, words=[*words, "--checkpoint-every-steps", "50"]) as job:
        while job.process.poll() is None:
            time.sleep(0.05)
            if done < kills and len(pids := job.training()) > 1 and job.share(EPOCHS) > places[done]:
                kill(draws.choice(pids))
                done += 1
        assert job.process.returncode == 0, job.lines[-1].text
        result = job.result()
    counts = {"kills": done, "restarts": result["resumed"], "lost_ranks": result["lost_ranks"]}
    return {"seed": seed, "ranks": ranks, "asked": kills, **counts, "accuracy": result["eval_accuracy"]}


def measure_accuracy(chosen: argparse.Namespace) -> None:
    done = {(one["seed"], one["asked"]) for one in samples("accuracy")}
    for seed in range(chosen.n):
        for kills in (0, KILLS):
            if (seed, kills) not in done:
                keep("accuracy", accuracy(seed, kills=kills, ranks=chosen.np or 3))


def accuracy_table() -> None:
    table = Table(
        name="elastic-accuracy",
        question=f"{MODEL}, {EPOCHS} epochs of the digits: test accuracy in %, with kills and growing, and without:",
        columns=["kills", "restarts", "seeds", "mean", "sd", "lowest", "against none, by seed"],
    )
    found = samples("accuracy")
    of_none = {one["seed"]: 100 * one["accuracy"] for one in found if one["asked"] == 0}
    for asked in sorted({one["asked"] for one in found}):
        of_seed = {one["seed"]: 100 * one["accuracy"] for one in found if one["asked"] == asked}
        values = list(of_seed.values())
        by_seed = [value - of_none[seed] for seed, value in of_seed.items() if seed in of_none]
        table.add(
            kills="; ".join(str(one["kills"]) for one in found if one["asked"] == asked),
            restarts=sum(one.get("restarts", 0) for one in found if one["asked"] == asked),
            seeds=len(values),
            mean=f"{statistics.fmean(values):.2f}",
            sd=f"{statistics.stdev(values):.2f}" if len(values) > 1 else "-",
            lowest=f"{min(values):.2f}",
            **{"against none, by seed": middle(by_seed) if asked and by_seed else "-"},
        )
    table.write()


MEASURE_KILLS: dict[str, Callable[[argparse.Namespace], None]] = {
    "goodput": measure_goodput,
    "kills": measure_kills,
    "accuracy": measure_accuracy,
}
TABLES_OF_KILLS: dict[str, Callable[[], None]] = {
    "goodput": goodput_table,
    "kills": kills_table,
    "accuracy": accuracy_table,
}
