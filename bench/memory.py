"""The most memory that a rank holds: ours against DDP's and naive Horovod's, and what our parts add.

    python bench/memory.py

The jobs of bench/step.py, a few steps long. It is rank 0's, which writes the run's files; on a GPU what torch's
allocator had reserved there. Below the sides stand ours with other settings: a moving average, micro-batches (four
times the samples, which should cost nothing), Horovod's fusion buffer of another size.
"""

import argparse
import statistics

from pairs import Table, in_turns, ratio
from step import DDP, OURS, Answer, sides, sizes

PARTS = ("ema_epochs=2", "accumulate_steps=4", "fusion_threshold_mb=8")


def mib(answer: Answer) -> float:
    """What counts on its device."""
    return answer.memory.get("gpu_reserved_mib", answer.memory["resident_mib"])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--models", nargs="+", default=["efficientnet_b0:16", "mlp:64"], metavar="MODEL:BATCH")
    arguments.add_argument("--np", type=int, default=max(sizes()))
    arguments.add_argument("--rounds", type=int, default=1)
    arguments.add_argument("--steps", type=int, default=4)
    chosen = arguments.parse_args()

    table = Table(
        name="memory",
        question="The most memory of a rank, MiB, and that of DDP's:",
        columns=["model", "batch", "np", "side", "MiB", "of DDP's", "more than ours"],
        about={"rounds": chosen.rounds},
    )
    for case in chosen.models:
        model, batch = case.split(":")
        words = ["--model", model, "--batch", batch, "--steps", str(chosen.steps)]
        answers = in_turns(sides(chosen.np, words, PARTS), chosen.rounds)
        held = {side: [mib(answer) for answer in of_side] for side, of_side in answers.items()}
        for side, values in held.items():
            more = statistics.median(values) - statistics.median(held[OURS])
            table.add(
                model=model,
                batch=int(batch),
                np=chosen.np,
                side=side,
                MiB=round(statistics.median(values)),
                **{"of DDP's": ratio(values, held[DDP]), "more than ours": round(more)},
            )
    table.write()


if __name__ == "__main__":
    main()
