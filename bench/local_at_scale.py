"""Does `--sync local` keep the accuracy that a large batch loses? Recipe `scaled` on the digits, 8 images at a time.

    python bench/local_at_scale.py --out runs/local_at_scale

64 ranks' worth of images between two sums over all: 8 ranks, each a group of its own, either accumulate 8 batches for
a step or take 8 steps of one batch. Five-fold cross-validation over all 1,797 images, times some seeds. What is done is
kept in OUT/results.jsonl: the command goes on where it was cut off. At the end it prints a table.

Intervals are 95 % by Student's t over the fold-and-seed pairs; folds share training images: they are a little narrow.
"""

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accuracy_at_scale import FOLDS, interval, trained
from sklearn.model_selection import StratifiedKFold

from hvdtrain.feed.feed import Resident
from hvdtrain.ranks.connect import connect
from hvdtrain.sync.comm import group_ranks
from hvdtrain.vision import images
from hvdtrain.vision.settings import scaled


@dataclass(frozen=True, kw_only=True)
class Way:
    """How often ranks of 8 images a batch take a step, and meet."""

    ranks: int = 8
    accumulate: int = 1
    every: str | None = None  # as --sync-every; None for --sync flat


WAYS = {
    "1 rank": Way(ranks=1),
    "flat, 8 x 8 x 8": Way(accumulate=8),
    "local 8, 8 x 8": Way(every="8"),
    "local 16, 8 x 8": Way(every="16"),
    "local 4, 8 x 8": Way(every="4"),
    "local 16@5, 8 x 8": Way(every="16@5"),
}


def settings() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("runs/local_at_scale"))
    arguments.add_argument("--ways", default=";".join(WAYS), help="which, with ; between them")
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--worker", help="the way of this rank; set by the script itself")
    return arguments.parse_args()


def finished(out: Path) -> list[dict[str, Any]]:
    file = out / "results.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def work(chosen: argparse.Namespace) -> None:
    """One rank of one way: train what is not finished yet."""
    way = WAYS[chosen.worker]
    comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
    if way.every is not None:
        comm = group_ranks(comm, 1)
    torch.set_num_threads(1)
    done = comm.allgather([[run["way"], run["fold"], run["seed"]] for run in finished(chosen.out)])[0]
    comm.start()
    digits = images.digits()
    assert isinstance(digits.train, Resident)
    assert isinstance(digits.test, Resident)
    pixels = torch.cat([digits.train.tensors["images"], digits.test.tensors["images"]])
    labels = torch.cat([digits.train.tensors["labels"], digits.test.tensors["labels"]])
    folds = list(StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(pixels, labels))
    for seed, fold in ((seed, fold) for seed in range(chosen.seeds) for fold in range(FOLDS)):
        if [chosen.worker, fold, seed] in done:
            continue
        config = dataclasses.replace(
            scaled(),
            data="digits",
            model="efficientnet_tiny",
            pretrained=None,
            epochs=chosen.epochs,
            batch_size_per_rank=8,
            accumulate_steps=way.accumulate,
            sync="flat" if way.every is None else "local",
            sync_every=way.every,
            sync_group_size=None if way.every is None else 1,
            seed=seed,
        )
        train, test = (Resident(images=pixels[part], labels=labels[part]) for part in folds[fold])
        accuracy, steps = trained(comm, config, dataclasses.replace(digits, train=train, test=test))
        if comm.rank == 0:
            result = {"way": chosen.worker, "fold": fold, "seed": seed, "accuracy": accuracy, "steps": steps}
            with (chosen.out / "results.jsonl").open("a") as lines:
                lines.write(json.dumps(result) + "\n")


def meetings(way: Way, steps: int, epochs: int) -> int:
    """Sums over all ranks in a run of so many steps."""
    every, _, from_epoch = (way.every or "1").partition("@")
    apart, per_epoch = epochs - int(from_epoch or 0), steps // epochs
    met = sum(step % int(every) == 0 or step % per_epoch == 0 for step in range(1, apart * per_epoch + 1))
    return steps - apart * per_epoch + met


def rows(results: list[dict[str, Any]], epochs: int) -> list[str]:
    """A Markdown table; changes are between runs of the same fold and seed."""
    by_way = {way: {(run["fold"], run["seed"]): run for run in results if run["way"] == way} for way in WAYS}
    lines = ["| way | steps | sums over all | test accuracy % | against 1 rank, points | against flat, 8 x 8 x 8 | n |"]
    lines.append("|---|--:|--:|--:|--:|--:|--:|")
    for way, runs in by_way.items():
        if not runs:
            continue
        values = {pair: 100 * run["accuracy"] for pair, run in runs.items()}
        steps = next(iter(runs.values()))["steps"]
        words = [way, str(steps), str(meetings(WAYS[way], steps, epochs)), mean_of(list(values.values()))]
        for other in ("1 rank", "flat, 8 x 8 x 8"):
            pairs = values.keys() & by_way[other].keys() if other != way else ()
            changes = [values[pair] - 100 * by_way[other][pair]["accuracy"] for pair in pairs]
            words.append(mean_of(changes, sign="+") if changes else "")
        lines.append(f"| {' | '.join([*words, str(len(runs))])} |")
    return lines


def mean_of(values: list[float], sign: str = "") -> str:
    return f"{statistics.fmean(values):{sign}.2f} ± {interval(values):.2f}"


def main() -> None:
    chosen = settings()
    if chosen.worker is not None:
        work(chosen)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    one = {"OMP_NUM_THREADS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    for way in chosen.ways.split(";"):
        launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(WAYS[way].ranks)]
        words = ["--out", str(chosen.out), "--epochs", str(chosen.epochs), "--seeds", str(chosen.seeds)]
        command = [*launch, sys.executable, __file__, *words, "--worker", way]
        env = {**os.environ, **one, "MPIEXEC_TIMEOUT": "7200"}
        if subprocess.run(command, env=env, check=False).returncode != 0:
            sys.exit(f"{way} failed")
    print(*rows(finished(chosen.out), chosen.epochs), sep="\n")


if __name__ == "__main__":
    main()
