"""Variants of how our ranks send and wait, each a job of bench/timed_steps.py, against the first of them."""

import argparse
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

from pairs import HERE, Table, in_turns, job, mpirun, ratio

Variant = tuple[list[str], dict[str, str]]  # words of timed_steps.py, and environment


def arguments(about: str) -> argparse.ArgumentParser:
    """What every comparison of variants is asked."""
    words = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--rounds", type=int, default=5)
    words.add_argument("--ranks", type=int, default=2)
    words.add_argument("--batch", default="16", help="images per rank and step")
    words.add_argument("--steps", default="20", help="timed, of each job")
    words.add_argument("--models", nargs="+", default=("efficientnet_b0", "mlp"))
    words.add_argument("--only", default="", help="variants with this in their names, besides the first")
    return words


def compare(
    variants: Mapping[str, Variant],
    chosen: argparse.Namespace,
    *,
    name: str,
    question: str,
    beside: AbstractContextManager[Any] | None = None,
    **about: str,
) -> None:
    """Run them in turns, and `beside` as long; a row for each model and variant."""
    first = next(iter(variants))
    against = f"time against {first}"
    table = Table(
        name=name,
        question=question,
        columns=["model", "variant", "step ms", against],
        about={"batch per rank": chosen.batch, "steps per job": chosen.steps, **about},
    )
    wanted = {name: one for name, one in variants.items() if name == first or chosen.only in name}
    with beside or nullcontext():
        for model in chosen.models:
            shared = ["--model", model, "--batch", chosen.batch, "--steps", chosen.steps]
            jobs = {
                name: partial(_step_ms, chosen.ranks, [*shared, *words], environment)
                for name, (words, environment) in wanted.items()
            }
            measured = in_turns(jobs, chosen.rounds)
            for variant, times in measured.items():
                row = {"model": model, "variant": variant, "step ms": f"{sorted(times)[len(times) // 2]:.1f}"}
                table.add(**row, **{against: ratio(times, measured[first])})
    table.write()


def _step_ms(ranks: int, words: list[str], environment: dict[str, str]) -> float:
    return float(job(mpirun(ranks), [str(HERE / "timed_steps.py"), *words], environment)["step_ms"])
