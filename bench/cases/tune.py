"""`hvdlaunch tune`: what it credits if nothing helps, on a slow link, without one, and compared with a full grid.

Hosts are network namespaces with a link between them; each has the cores of this machine.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.jobs import ADDRESSES, HERE, environment, two_hosts
from bench.pairs import Case, Table, middle
from launch.advice.tune.measure import Measurer
from launch.advice.tune.remedies import Catalogue, Remedy, ask_program
from launch.advice.tune.walk import Wanted
from launch.cli.options import parser
from launch.cli.start import _request

NOOPS = 10
GUIDES = "1.2 to 1.5"  # speedup that flow charts promise without a measurement
# A window is the time of some sums; the remedies change nothing.
NOOP = f"""
import json, os, sys, time
if "--remedies" in sys.argv:
    named = [{{"name": f"noop {{n}}", "options": [f"--noop-{{n}}"], "what_for": "computation", "same_training": True}}
             for n in range({NOOPS})]
    print(json.dumps({{"remedies": named}}))
    sys.exit()
while True:
    began = time.perf_counter()
    for _ in range(40):
        sum(range(20_000))
    line = json.dumps({{"samples": 40, "seconds": time.perf_counter() - began}})
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "0":
        with open(os.environ["HVDLAUNCH_WINDOWS"], "a") as windows:
            windows.write(line + "\\n")
"""
# A program with only those remedies that ONLY names, if it names any.
CHOOSE = """
import json, os, runpy, subprocess, sys
only = json.loads(os.environ["BENCH_ONLY"])
if "--remedies" in sys.argv and only:
    words = [sys.executable, "-m", "hvdtrain.effnet", *sys.argv[1:]]
    named = json.loads(subprocess.run(words, stdout=subprocess.PIPE, check=True).stdout)
    named["remedies"] = [one for one in named["remedies"] if one["name"] in only]
    print(json.dumps(named))
else:
    runpy.run_module("hvdtrain.effnet", run_name="__main__", alter_sys=True)
"""
# A point of the grid has one value from each row. Both hosts share the cores of one machine: with 2 threads per rank,
# threads wait for cores, and 3 points of 3 had 0.04 to 0.5 of the speed with 1.
GRID: Mapping[str, Sequence[str]] = {
    "threads": ("1",),
    "batch": ("--batch-size-per-rank 4", "--batch-size-per-rank 16", "--batch-size-per-rank 64"),
    "precision": ("--precision tf32", "--precision bf16"),
    "gradients": ("", "--compression fp16", "--compression powersgd:2", "--sync local:16"),
}


def training(model: str, batch: int) -> list[str]:
    """Return the program that is tuned."""
    return [
        sys.executable,
        "-m",
        "hvdtrain.effnet",
        "--data",
        "digits",
        "--model",
        model,
        *f"--batch-size-per-rank {batch}".split(),
    ]


@contextmanager
def hosts(rate: str) -> Iterator[tuple[list[str], dict[str, str], list[str]]]:
    """Yield the prefix for a command on the first of two hosts, hvdlaunch's environment on it, and its options.

    hvdlaunch passes few variables on to mpirun, so the path to the second host is in a file. The virtual link needs a
    moment to come up.
    """
    with two_hosts(rate, 1) as launch, tempfile.TemporaryDirectory() as folder:
        start, way, agent = launch.index("mpirun"), Path(folder) / "h2", Path(folder) / "agent"
        enter = f"nsenter --target=$(cat {way}) --net --uts --mount"
        agent.write_text(f'#!/bin/sh\nshift\nexec {enter} sh -c "$*"\n')
        agent.chmod(0o755)
        pairs = [(launch[place + 1], launch[place + 2]) for place, word in enumerate(launch) if word == "--mca"]
        settings = {f"OMPI_MCA_{name}": value for name, value in pairs} | {"OMPI_MCA_plm_rsh_agent": str(agent)}
        where = f"-np 2 -H {ADDRESSES[0]}:1,{ADDRESSES[1]}:1 --gpus none --bind none".split()
        keep = ["sh", "-c", f'echo $H2 > {way}; sleep 2; exec "$@"', "sh"]
        yield [*launch[:start], *keep], {**environment(), **settings}, where


def tuned(
    start: Sequence[str], options: Sequence[str], program: Sequence[str], env: Mapping[str, str], *, minutes: float
) -> dict[str, Any]:
    """Return the result of a walk; end the benchmark if there is none."""
    with tempfile.TemporaryDirectory() as folder:
        words = [*start, sys.executable, "-m", "launch", "tune", "--name", "bench", "--minutes", f"{minutes:g}"]
        done = subprocess.run(
            [*words, *options, "--", *program], cwd=folder, env=dict(env), stdout=sys.stderr, check=False
        )
        file = Path(folder) / "tunes/bench/tune.json"
        if done.returncode or not file.exists():
            sys.exit(f"hvdlaunch tune ended with status {done.returncode}")
        return dict(json.loads(file.read_text())["result"])


def noops(chosen: argparse.Namespace) -> Table:
    """Ten remedies that change nothing: in how many walks one is credited (1 in 20 is allowed); a minute per walk."""
    table = Table(
        name="tune-noops",
        question=f"Walks of hvdlaunch tune over {NOOPS} remedies that change nothing, on 2 ranks:",
        columns=["walk", "credited", "largest gain", "not tried"],
    )
    wrong = 0
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "noop.py"
        program.write_text(NOOP)
        options = ["-np", "2", "--gpus", "none"]
        for number in range(chosen.walks):
            found = tuned([], options, [sys.executable, str(program)], environment(), minutes=30)
            credited = [one["name"] for one in found["remedies"] if one["credited"]]
            wrong += bool(credited)
            largest = max(one["gain"]["times"] for one in found["remedies"] if one["gain"])
            table.add(number, ", ".join(credited) or "none", round(largest, 3), len(found["not_tried"]))
    table.conditions = {"walks": chosen.walks, "walks with a credit": wrong}
    table.holds = wrong <= chosen.walks / 20
    return table


def times(gain: Mapping[str, Any] | None) -> str | None:
    """Format a gain with its interval and n."""
    if gain is None:
        return None
    return f"{gain['times']:.2f} ({gain['low']:.2f} to {gain['high']:.2f}, n = {gain['pairs']})"


def links(chosen: argparse.Namespace) -> Table:
    """The gain of a walk over two hosts, on each link; as root, with iproute2; --minutes for each."""
    table = Table(
        name="tune-links",
        question="Times as fast by hvdlaunch tune, two hosts of one rank:",
        columns=[
            "link",
            "communication",
            "equal training",
            "another training",
            "credited",
            "skipped",
            "not tried",
            "guides",
        ],
        conditions={"model": chosen.model, "batch": chosen.batch, "minutes": chosen.minutes},
    )
    for rate in chosen.rates:
        with hosts(rate) as (start, env, options), tempfile.TemporaryDirectory() as folder:
            choose = Path(folder) / "choose.py"
            choose.write_text(CHOOSE)
            program = [sys.executable, str(choose), *training(chosen.model, chosen.batch)[3:]]
            only = {"BENCH_ONLY": json.dumps([*filter(None, chosen.only)])}
            found = tuned(start, [*options, "-x", *only], program, {**env, **only}, minutes=chosen.minutes)
        credited = ", ".join(one["name"] for one in found["remedies"] if one["credited"]) or "none"
        share, total = found["shares"].get("communication"), found["total"]
        cells = (None if share is None else f"{share:.0%}", times(total["same"]), times(total["another"]))
        left = (", ".join(found[name]) or "none" for name in ("skipped", "not_tried"))
        table.add(rate, *cells, credited, *left, GUIDES)
    return table


def measure_grid(
    out: Path,
    *,
    grid: Sequence[Sequence[str]],
    model: str,
    options: Sequence[str],
    walked: Sequence[str],
    walked_env: Mapping[str, str],
    pairs: int,
) -> None:
    """On the first host: measure each point of the grid once, then the best in turn with what the walk has found."""
    program = training(model, 4)
    words = parser().parse_args(["tune", *options])
    words.program = program
    measure = ask_program(program, os.environ).measure
    measurer = Measurer(
        request=_request(words), catalogue=Catalogue(remedies=(), measure=measure), environment=os.environ, job="grid"
    )
    numbers = itertools.count(1)

    def rate_of(point: Remedy) -> float:
        wanted = Wanted(configuration=(point,), what=point.name)
        start = measurer.start(wanted, number=next(numbers), limit_s=300)
        print(f"{point.name}: {start.problem or round(start.rate, 1)}", file=sys.stderr, flush=True)
        return 0.0 if start.problem else start.rate

    def point(threads: str, *options: str) -> Remedy:
        name = " ".join([f"OMP_NUM_THREADS={threads}", *filter(None, options)])
        split = tuple(word for option in options for word in option.split())
        variables = (("OMP_NUM_THREADS", threads),)
        return Remedy(name=name, options=split, environment=variables, what_for="", same_training=False)

    points = [point(*chosen) for chosen in itertools.product(*grid)]
    best = max(points, key=rate_of)
    found = Remedy(
        name="walk", options=tuple(walked), environment=tuple(walked_env.items()), what_for="", same_training=False
    )
    ratios = []
    for number in range(pairs):
        order = (best, found) if number % 2 == 0 else (found, best)
        rates = {one.name: rate_of(one) for one in order}
        ratios.append(rates["walk"] / rates[best.name])
    out.write_text(json.dumps({"best": best.name, "points": len(points), "ratios": ratios}))


def grid(chosen: argparse.Namespace) -> Table:
    """From a bad start (1 thread, batch 4, fp32, a slow link): the walk's speed relative to the best of a full grid.

    Status 1 if it is below 0.9.
    """
    table = Table(
        name="tune-grid",
        question="Speed of what hvdlaunch tune finds from a bad start, over the best of a grid:",
        columns=["link", "best of the grid", "points", "walk", "walk / best"],
        conditions={"model": chosen.model, "minutes": chosen.minutes},
    )
    for rate in chosen.rates:
        with hosts(rate) as (start, env, options):
            program = training(chosen.model, 4)
            found = tuned(start, options, program, env, minutes=chosen.minutes)
            words = found["commands"].get("another", found["commands"]["same"]).split()
            walked = words[words.index("--") + 1 + len(program) :]
            variables = dict(word.split("=", 1) for word in words[: words.index("hvdlaunch")] if word != "env")
            arguments = {
                "grid": [*GRID.values()],
                "model": chosen.model,
                "options": options,
                "walked": walked,
                "walked_env": variables,
            }
            with tempfile.TemporaryDirectory() as folder:
                out = Path(folder) / "grid.json"
                job = [sys.executable, str(HERE / "jobs.py"), "cases.tune:measure_grid", str(out)]
                subprocess.run(
                    [*start, *job, json.dumps({**arguments, "pairs": chosen.pairs})], cwd=folder, env=env, check=True
                )
                answer = json.loads(out.read_text())
        named = " ".join([*(f"{name}={value}" for name, value in variables.items()), *walked])
        table.add(rate, answer["best"], answer["points"], named, middle(answer["ratios"]))
        table.holds = table.holds and statistics.median(answer["ratios"]) >= 0.9
    return table


LINKS = {"model": "efficientnet_b0", "batch": 16, "minutes": 40.0, "only": [""], "rates": ["100mbit", "none"]}
CASES = {
    "tune-noops": Case(measure=noops, options={"walks": 20}),
    "tune-links": Case(measure=links, options=LINKS),
    "tune-grid": Case(
        measure=grid, options={"model": "efficientnet_tiny", "minutes": 20.0, "pairs": 3, "rates": ["100mbit"]}
    ),
}
