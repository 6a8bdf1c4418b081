"""Does accuracy survive more ranks? Recipe `book` against `scaled` on the digits, at the same batch per rank.

Up to 8 are real ranks under mpirun; 32 and 64 are 2 ranks that accumulate 16 and 32 batches per step. Completed runs
are kept in --out, and the same command resumes after an interruption. Changes are by seed.
"""

import argparse
import json
import sys
from itertools import product
from pathlib import Path

from bench.jobs import mpirun, run
from bench.pairs import Case, Table, middle

TRAIN = ["--data", "digits", "--model", "efficientnet_tiny", "--pretrained", "none", "--checkpoint-every", "0s"]
MOST_RANKS = 8  # real ones


def accuracy_of(chosen: argparse.Namespace, way: str, size: int, seed: int) -> float:
    """Return the accuracy of one run, in percent."""
    name = f"{way}-{size}-{seed}-{chosen.epochs}x{chosen.batch}"
    result = chosen.out.resolve() / "accuracy" / name / "result.json"
    if not result.exists() or json.loads(result.read_text())["exit_reason"] != "finished":
        ranks = size if size <= MOST_RANKS else 2
        words = ["--recipe", way, *TRAIN, "--runs-dir", str(chosen.out.resolve())]
        words += ["--run", f"accuracy/{name}", "--seed", str(seed), "--epochs", str(chosen.epochs)]
        words += ["--batch-size-per-rank", str(chosen.batch), "--accumulate-steps", str(size // ranks)]
        run([*mpirun(ranks), sys.executable, "-m", "hvdtrain.effnet", *words])
    return 100 * float(json.loads(result.read_text())["eval_accuracy"])


def accuracy(chosen: argparse.Namespace) -> Table:
    """Accuracy on the digits by recipe and ranks; a change is relative to the first of --sizes."""
    table = Table(
        name="accuracy",
        question=f"Test accuracy on the digits, {chosen.batch} images per rank, {chosen.epochs} epochs, in percent:",
        columns=["way", "ranks", "test accuracy %", "change, points"],
    )
    reached: dict[tuple[str, int], list[float]] = {}
    for way, size in product(chosen.ways, chosen.sizes):
        values = [accuracy_of(chosen, way, size, seed) for seed in range(chosen.seeds)]
        reached[way, size] = values
        others = reached[way, chosen.sizes[0]]
        change = middle([one - other for one, other in zip(values, others, strict=True)])
        table.add(way, size if size <= MOST_RANKS else f"{size}, virtual", middle(values), change)
    return table


RUNS = {"sizes": [1, 2, 4, 8, 32, 64], "seeds": 5, "epochs": 10, "batch": 8, "out": Path("runs")}
CASES = {"accuracy": Case(measure=accuracy, options={"ways": (["scaled", "book"], ["scaled", "book"]), **RUNS})}
