"""Sequences/s of our BERT's step over masked words, against transformers' model in a plain loop and in its Trainer.

    python bench/masked_words.py                                         bert_tiny, 1 and 2 ranks
    python bench/masked_words.py --models bert_base:32 --tokens 128 --precision bf16 --np 1    on a GPU

The same sizes, sequences and optimizer (fused AdamW) on all sides; sequences have from half of --tokens to all, and are
filled up. Ours draws its masks within the step, the others get theirs ready. At 1 rank against the plain loop, at more
against Trainer, as DDP by torchrun. Jobs of all sides run in turns; each answers with its steps' times after a warm-up.
"""

import argparse
import functools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pairs import HERE, Table, in_turns, job, mpirun, ratio, torchrun

OURS, PLAIN, TRAINER = "ours", "transformers in a plain loop", "Trainer with DDP"
GOALS = {PLAIN: ">= 1.5", TRAINER: ">= 1.0"}


def sides(ranks: int, words: Sequence[str]) -> dict[str, functools.partial[dict[str, Any]]]:
    """All jobs to compare, by name."""
    ours = functools.partial(job, mpirun(ranks) if ranks > 1 else [], [str(HERE / "our_masked_words.py"), *words])
    if ranks == 1:
        return {OURS: ours, PLAIN: functools.partial(job, [], [str(HERE / "peers/plain_masked_words.py"), *words])}
    return {OURS: ours, TRAINER: functools.partial(job, torchrun(ranks), [str(HERE / "peers/trainer.py"), *words])}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--models", nargs="+", default=["bert_tiny:32"], metavar="MODEL:BATCH")
    arguments.add_argument("--np", type=int, nargs="+", default=[1, 2])
    arguments.add_argument("--tokens", type=int, default=64)
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--steps", type=int, default=20, help="timed ones of a job")
    arguments.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    chosen = arguments.parse_args()

    table = Table(
        name="masked_words",
        question="Sequences/s of our step over masked words, times those of transformers:",
        columns=["model", "batch", "np", "against", "by the median step", "goal", "sequences/s"],
        about={"tokens": chosen.tokens, "precision": chosen.precision, "rounds": chosen.rounds},
    )
    for ranks in chosen.np:
        for case in chosen.models:
            model, batch = case.split(":")
            words = ["--model", model, "--batch", batch, "--steps", str(chosen.steps)]
            words += ["--tokens", str(chosen.tokens), "--precision", chosen.precision]
            add_row(table, in_turns(sides(ranks, words), chosen.rounds), model=model, batch=int(batch), np=ranks)
    table.write()


def add_row(
    table: Table, answers: Mapping[str, Sequence[Mapping[str, Any]]], *, model: str, batch: int, np: int
) -> None:
    """Ours against the peer."""
    speeds = {
        side: [np * batch / statistics.median(answer["step_s"]) for answer in of_side]
        for side, of_side in answers.items()
    }
    [peer] = speeds.keys() - {OURS}
    table.add(
        model=model,
        batch=batch,
        np=np,
        against=peer,
        **{"by the median step": ratio(speeds[OURS], speeds[peer])},
        goal=GOALS[peer],
        **{"sequences/s": round(statistics.median(speeds[OURS]), 1)},
    )


if __name__ == "__main__":
    main()
