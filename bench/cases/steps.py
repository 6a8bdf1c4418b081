"""Times steps of whole jobs: compared with peers, their memory, checkpoints, stages, and over a slow link.

Jobs of all sides run in turn over the same tensors (bench/sides.py). The median step shows ordinary steps; the mean
includes reports and other rare work.
"""

import argparse
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from bench.jobs import job, mpirun, torchrun, two_hosts
from bench.pairs import Case, Table, in_turns, middle, ratio

OURS, *PEERS = ["ours", "DDP", "plain", "naive", "yielding"]
MORE_MEMORY = ("--ema-epochs 2", "--accumulate-steps 4", "--fusion-threshold-mb 8")
FLAT = "flat"
SIZES = [1, 2] if torch.cuda.device_count() != 1 else [1]  # numbers of ranks with devices on this machine
LONGEST_ROUND = 16  # steps between two synchronizations; the timed steps must be whole rounds
CROSSING = {
    FLAT: "",
    "two-level": "--sync two-level",
    "fp16": "--compression fp16",
    "fp16, two-level": "--sync two-level --compression fp16",
    "powersgd:2": "--compression powersgd:2",
    "divided": "--shard-optimizer",
    "fp16, divided": "--shard-optimizer --compression fp16",
    "local, every 4": "--sync local:4",
    "local, every 16": "--sync local:16",
}

Answer = dict[str, Any]  # of bench/sides.py


def sides(ranks: int, given: Mapping[str, Any], more: Sequence[str]) -> dict[str, Callable[[], Answer]]:
    """Return all jobs to compare, by name; ours also with each of these options."""
    found = ours(ranks, given, {OURS: "", **{f"{OURS}, {one}": one for one in more}})
    found["DDP"] = partial(job, torchrun(ranks), "sides:ddp", **given)
    if ranks == 1:
        return found | {"plain": partial(job, [], "sides:plain", **given)}
    naive = partial(job, mpirun(ranks), "sides:naive_horovod", **given)
    yielding = partial(naive, env={"OMPI_MCA_mpi_yield_when_idle": "1"})
    return found | {"naive": naive, "yielding": yielding}


def ours(
    ranks: int, given: Mapping[str, Any], ways: Mapping[str, str], launch: Sequence[str] = ()
) -> dict[str, Callable[[], Answer]]:
    """Return our jobs by name, with these options; under mpirun if nothing else launches several ranks."""
    launch = launch or (mpirun(ranks) if ranks > 1 else [])
    return {way: partial(job, launch, "sides:ours", words=words.split(), **given) for way, words in ways.items()}


def givens(chosen: argparse.Namespace, **more: Any) -> Iterator[dict[str, Any]]:
    """Yield the arguments of the jobs for each of --models."""
    for case in chosen.models:
        model, _, batch = case.partition(":")
        yield {"model": model, "batch": int(batch), "steps": chosen.steps, "pixels": chosen.pixels, **more}


def centres(answers: Mapping[str, Sequence[Answer]], centre: Callable[[list[float]], float]) -> dict[str, list[float]]:
    """Return the median or mean step of each job, s, by side."""
    return {side: [centre(answer["step_s"]) for answer in of_side] for side, of_side in answers.items()}


def mib(answer: Answer) -> list[float]:
    """Return the memory of each rank that answers: on a GPU reserved by torch's allocator, else resident."""
    return [one.get("gpu_reserved_mib", one["resident_mib"]) for one in answer["memory"]]


def step(chosen: argparse.Namespace) -> Table:
    """Samples/s of our step compared with DDP, naive Horovod (as it is, and made to yield) and a plain loop.

    A model is mlp or an EfficientNet, with its batch per rank. With --more="--reducer horovod", ours also runs with
    these options of hvdtrain.effnet.
    """
    table = Table(
        name="step",
        question="Samples/s of our loop, times those of others over the same tensors:",
        columns=["model", "batch", "np", "side", "against", "by the median step", "by the mean step", "samples/s"],
        conditions={"precision": chosen.precision, "compiled": chosen.compile, "pixels": chosen.pixels},
    )
    for ranks in chosen.np:
        for given in givens(chosen, precision=chosen.precision, compiled=chosen.compile):
            found = sides(ranks, given, [chosen.more] if chosen.more else [])
            compared = {name: start for name, start in found.items() if name in chosen.peers or name.startswith(OURS)}
            answers = in_turns(compared, chosen.rounds)
            medians, means = centres(answers, statistics.median), centres(answers, statistics.fmean)
            for side in (name for name in answers if name.startswith(OURS)):
                speed = ranks * given["batch"] / statistics.median(medians[side])
                for peer in (name for name in answers if not name.startswith(OURS)):
                    ratios = ratio(medians[peer], medians[side]), ratio(means[peer], means[side])
                    table.add(given["model"], given["batch"], ranks, side, peer, *ratios, round(speed, 1))
    return table


def memory(chosen: argparse.Namespace) -> Table:
    """Peak memory of rank 0 compared with DDP's, and the contribution of our parts.

    Ours includes the evaluation and the checkpoint at the end of a run.
    """
    table = Table(
        name="memory",
        question="The most memory of a rank, MiB, and that of DDP's:",
        columns=["model", "batch", "np", "side", "MiB", "of DDP's", "more than ours"],
    )
    for ranks in chosen.np:
        for given in givens(chosen):
            answers = in_turns(sides(ranks, given, MORE_MEMORY), chosen.rounds)
            held = {side: [mib(answer)[0] for answer in of_side] for side, of_side in answers.items()}
            for side, values in held.items():
                most, least = statistics.median(values), statistics.median(held[OURS])
                of_ddps, more = ratio(values, held["DDP"]), round(most - least)
                table.add(given["model"], given["batch"], ranks, side, round(most), of_ddps, more)
    return table


def saves(chosen: argparse.Namespace) -> Table:
    """The cost of a checkpoint for the training, including the steps during which it is written."""
    table = Table(
        name="saves",
        question=f"The mean step with a checkpoint every {chosen.every} steps, against that without:",
        columns=["model", "batch", "np", "times as long", "ms per checkpoint"],
    )
    ways = {"with": f"--checkpoint-every {chosen.every}steps", "without": "--checkpoint-every 0s"}
    for ranks in chosen.np:
        for given in givens(chosen):
            saved, unsaved = centres(in_turns(ours(ranks, given, ways), chosen.rounds), statistics.fmean).values()
            cost_ms = [1000 * chosen.every * (one - other) for one, other in zip(saved, unsaved, strict=True)]
            table.add(given["model"], given["batch"], ranks, ratio(saved, unsaved), middle(cost_ms))
    return table


def pipeline(chosen: argparse.Namespace) -> Table:
    """Two stages compared with two replicas at the same global batch: samples/s, operations, memory of each rank.

    Operations are what torch dispatches on all ranks; on GPUs they are not counted. With --more="--sync-bn" both also
    have these options of the program; with 4 ranks there are 2 replicas of 2 stages.
    """
    speeds = ["stages, samples/s", "stages / replicas", "M / (M + S - 1)"]
    table = Table(
        name="pipeline",
        question="Samples/s of 2 stages over those of 2 replicas, the same global batch, and MiB of each rank:",
        columns=["model", "micro-batches", *speeds, "operations / replicas'", "stages, MiB", "replicas, MiB"],
    )
    for given in givens(chosen):
        for count in chosen.micro_batches:
            cuts = {"stages": f"--stages 2 --accumulate-steps {count}", "replicas": f"--accumulate-steps {count // 2}"}
            ways = {side: f"{cut} {chosen.more}" for side, cut in cuts.items()}
            answers = in_turns(ours(chosen.ranks, given, ways), chosen.rounds)
            stages_s, replicas_s = centres(answers, statistics.median).values()
            held = [", ".join(f"{one:.0f}" for one in mib(answers[way][0])) for way in ways]
            cut, whole = (sum(answers[way][0]["operations"]) for way in ways)
            samples = chosen.ranks // 2 * count * given["batch"]
            speed, bound = round(samples / statistics.median(stages_s), 1), round(count / (count + 1), 3)
            more = f"{cut / whole:.3f}" if whole else None
            table.add(given["model"], count, speed, ratio(replicas_s, stages_s), bound, more, *held)
    return table


def slow_link(chosen: argparse.Namespace) -> Table:
    """The gain of each option for a slow link between two hosts, and a host's sent bytes; as root, with iproute2.

    The hosts are network namespaces; --rates of the link are in tc's notation, or none.
    """
    table = Table(
        name="slow-link",
        question="Time of a step and what a host sends, by what crosses the link between 2 hosts:",
        columns=["link", "model", "way", "ms per step", "MB per step", "times as fast as flat"],
        conditions={"ranks per host": chosen.ranks_per_host},
    )
    for rate in chosen.rates:
        for given in givens(chosen, warmup=LONGEST_ROUND):
            with two_hosts(rate, chosen.ranks_per_host) as launch:
                ways = {way: words for way, words in CROSSING.items() if way in (FLAT, *chosen.ways)}
                answers = in_turns(ours(2 * chosen.ranks_per_host, given, ways, launch), chosen.rounds)
            steps_s = centres(answers, statistics.fmean)
            for way, of_way in steps_s.items():
                sent_mb = statistics.median(one["sent_mb"] for one in answers[way]) / chosen.steps
                step_ms, speed_up = round(1000 * statistics.median(of_way)), ratio(steps_s[FLAT], of_way)
                table.add(rate, given["model"], way, step_ms, round(sent_mb, 2), speed_up)
    return table


SHARED = {"models": ["efficientnet_b0:16", "mlp:64"], "rounds": 3, "steps": 20, "pixels": 32}
OF_STEP = {"np": SIZES, "precision": ("tf32", ["tf32", "bf16"]), "compile": False, "more": "", "peers": (PEERS, PEERS)}
OF_SAVES = {"models": ["efficientnet_tiny:64"], "steps": 60, "np": SIZES[-1:], "every": 10}
OF_PIPELINE = {"models": ["bert_mini:2", "efficientnet_b0:2"], "steps": 8, "micro-batches": [8, 32]}
OF_PIPELINE |= {"ranks": 2, "more": ""}
OF_LINK = {"models": ["efficientnet_b0:16"], "steps": 32, "ranks-per-host": 1, "rates": ["100mbit", "1gbit"]}
CASES = {
    "step": Case(measure=step, options=SHARED | OF_STEP),
    "memory": Case(measure=memory, options=SHARED | {"rounds": 1, "steps": 4, "np": SIZES[-1:]}),
    "saves": Case(measure=saves, options=SHARED | OF_SAVES),
    "pipeline": Case(measure=pipeline, options=SHARED | OF_PIPELINE),
    "slow-link": Case(measure=slow_link, options=SHARED | OF_LINK | {"ways": (list(CROSSING), list(CROSSING))}),
}
