"""Samples/s of our loop against plain PyTorch with torchrun and DDP, and against naive Horovod.

    python bench/step.py                                     about ten minutes on 2 cores
    python bench/step.py --models mlp:64 --np 2 --set reducer=horovod --rounds 5
    python bench/step.py --models efficientnet_b0:256 --precision bf16 --compile          on a GPU

The same weights, tensors, batch and optimizer on both sides (bench/workload.py): ours is train_epoch as a run calls it
(bench/ours.py), the peers are the loops in bench/peers/, where an EfficientNet's activations are in place as in
torchvision's own. Jobs of all sides run in turns; each answers with its steps' times after a warm-up. The median step
is that of ordinary ones, the mean has reports and whatever else comes rarely.
"""

import argparse
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from pairs import HERE, Table, in_turns, job, mpirun, ratio, torchrun

OURS, DDP, PLAIN = "ours", "torchrun + DDP", "a plain loop"
NAIVE, YIELDING = "naive Horovod", "naive Horovod, yielding"
STEPS = {"efficientnet_b0:16": 20, "efficientnet_b0:64": 10, "efficientnet_tiny:32": 60, "mlp:64": 20}  # timed
MEDIAN, MEAN = "by the median step", "by the mean step"
GOALS = {DDP: ">= 1.0", PLAIN: "-", NAIVE: "-", YIELDING: "-"}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Of one job."""

    step_s: list[float]
    memory: dict[str, float]  # MiB


Side = Callable[[], Answer]


def sides(ranks: int, words: Sequence[str], settings: Sequence[str] = ()) -> dict[str, Side]:
    """All jobs to compare, by name; those of ours with each of these settings besides the plain one."""

    def side(launch: Sequence[str], file: str, *more: str, env: Mapping[str, str] | None = None) -> Side:
        return lambda: Answer(**job(launch, [str(HERE / file), *words, *more], env))

    launch = mpirun(ranks) if ranks > 1 else []
    found = {OURS: side(launch, "ours.py")}
    found |= {f"{OURS}, {one}": side(launch, "ours.py", "--set", one) for one in settings}
    found[DDP] = side(torchrun(ranks), "peers/ddp.py")
    if ranks == 1:
        return found | {PLAIN: side([], "peers/plain.py")}
    naive = functools.partial(side, launch, "peers/naive_horovod.py")
    return found | {NAIVE: naive(), YIELDING: naive(env={"OMPI_MCA_mpi_yield_when_idle": "1"})}


def sizes() -> list[int]:
    """Numbers of ranks that this machine has devices for."""
    return [1, 2] if torch.cuda.device_count() != 1 else [1]


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--models", nargs="+", default=list(STEPS), metavar="MODEL:BATCH")
    arguments.add_argument("--np", type=int, nargs="+", default=sizes())
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, help="timed ones of a job; chosen by the model if not given")
    arguments.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    arguments.add_argument("--compile", action="store_true")
    arguments.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="ours once more, with this")
    chosen = arguments.parse_args()

    table = Table(
        name="step",
        question="Samples/s of our loop, times those of others over the same tensors:",
        columns=[
            "model",
            "batch",
            "np",
            "side",
            "against",
            "by the median step",
            "by the mean step",
            "goal",
            "samples/s",
        ],
        about={"precision": chosen.precision, "compiled": chosen.compile, "rounds": chosen.rounds},
    )
    for ranks in chosen.np:
        for case in chosen.models:
            model, batch = case.split(":")
            steps = chosen.steps or STEPS.get(case, 20)
            words = ["--model", model, "--batch", batch, "--steps", str(steps), "--precision", chosen.precision]
            words += ["--compile"] if chosen.compile else []
            answers = in_turns(sides(ranks, words, chosen.set), chosen.rounds)
            add_rows(table, answers, model=model, batch=int(batch), np=ranks)
    table.write()


def add_rows(table: Table, answers: Mapping[str, Sequence[Answer]], *, model: str, batch: int, np: int) -> None:
    """One for each of ours and each peer."""
    speeds = {
        centre: {side: [np * batch / centre(answer.step_s) for answer in of_side] for side, of_side in answers.items()}
        for centre in (statistics.median, statistics.fmean)
    }
    medians, means = speeds.values()
    for side in (name for name in answers if name.startswith(OURS)):
        for peer in (name for name in answers if not name.startswith(OURS)):
            table.add(
                model=model,
                batch=batch,
                np=np,
                side=side,
                against=peer,
                **{MEDIAN: ratio(medians[side], medians[peer]), MEAN: ratio(means[side], means[peer])},
                goal=GOALS[peer],
                **{"samples/s": round(statistics.median(medians[side]), 1)},
            )


if __name__ == "__main__":
    main()
