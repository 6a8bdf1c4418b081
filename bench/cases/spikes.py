"""Does --on-spike skip save a run with poisoned batches? A small network on the digits (bench/spikes.py)."""

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from bench.jobs import job, mpirun
from bench.pairs import Case, Table, middle

POISONED = (100, 101, 200, 300, 301, 302)  # steps, on the last rank only
SIDES = {"clean": ("report", ()), "poisoned, report": ("report", POISONED), "poisoned, skip": ("skip", POISONED)}


def result_of(ranks: int, seed: int, on_spike: str, poisoned: tuple[int, ...], lr: float) -> dict[str, Any]:
    """Return one run's result.json."""
    with tempfile.TemporaryDirectory() as folder:
        words = ["--runs-dir", folder, "--experiment", "e", "--run", "r", "--checkpoint-every-s", "0"]
        words += ["--seed", str(seed), "--on-spike", on_spike, "--lr", str(lr), "--schedule", "constant"]
        job(mpirun(ranks), "spikes:train", words=[*words, "--batch-size-per-rank", "32"], poisoned=poisoned)
        result: dict[str, Any] = json.loads((Path(folder) / "e" / "r" / "result.json").read_text())
        return result


def spikes(chosen: argparse.Namespace) -> Table:
    """Test accuracy of a run with poisoned batches, with and without --on-spike skip, compared with a run without.

    In 6 batches of one rank pixels are not scaled, and so 16 times as large, and labels are wrong. Changes are by seed.
    """
    about = f"{chosen.ranks} ranks, 575 steps, {len(POISONED)} of them poisoned on one rank, lr {chosen.lr}"
    table = Table(
        name="spikes",
        question=f"Digits, {about}:",
        columns=["run", "test accuracy %", "lowest", "change, points", "steps skipped"],
    )
    clean: list[float] = []
    for side, (on_spike, poisoned) in SIDES.items():
        results = [result_of(chosen.ranks, seed, on_spike, poisoned, chosen.lr) for seed in range(chosen.seeds)]
        values = [100 * (result["eval_accuracy"] or 0.0) for result in results]
        clean = clean or values
        change = middle([one - other for one, other in zip(values, clean, strict=True)])
        skipped = sorted({result["skipped_steps"] for result in results})
        table.add(side, middle(values), min(values), change, ", ".join(map(str, skipped)))
    return table


CASES = {"spikes": Case(measure=spikes, options={"ranks": 2, "seeds": 5, "lr": 0.1})}
