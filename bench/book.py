"""The reference recipe beside ours: seconds for an epoch of 50,000 images, with the same model and batch.

    python bench/book.py                         b7 with a batch of 256, where there is a GPU (goal: 5 times as fast)
                                                 a batch of 8, about three minutes on 2 cores

The reference is bench/peers/reference.py: a DataLoader that decodes and copies, fp32, Adam, DDP, and DataParallel where
one process has several GPUs. Ours is train_epoch with a run's defaults, on a GPU with bf16, compiled and not. An epoch
is the wait for its first batch and as many mean steps as it has, of those that were timed.
"""

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Sequence

import torch
from pairs import HERE, Table, in_turns, job, mpirun, ratio, torchrun
from workload import WARMUP_STEPS

IMAGES = 50_000
OURS, DDP, DATA_PARALLEL = "ours", "DataLoader, DDP", "DataLoader, DataParallel"
GPUS = torch.cuda.device_count()


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--model", default="efficientnet_b7")
    arguments.add_argument("--batch", type=int, default=256 if GPUS else 8, help="images per rank and step")
    arguments.add_argument("--steps", type=int, default=60 if GPUS else 6, help="timed ones of a job")
    arguments.add_argument("--np", type=int, default=max(1, GPUS))
    arguments.add_argument("--rounds", type=int, default=3)
    chosen = arguments.parse_args()
    # Ours reads what it trains on from the start of the data set.
    chosen.steps = min(chosen.steps, IMAGES // (chosen.np * chosen.batch) - WARMUP_STEPS)
    if chosen.steps < 1:
        sys.exit(f"{chosen.np} ranks with a batch of {chosen.batch} are too much for {IMAGES} images")
    words = ["--model", chosen.model, "--batch", str(chosen.batch), "--steps", str(chosen.steps)]

    def side(launch: Sequence[str], file: str, *more: str) -> Callable[[], float]:
        def epoch_s() -> float:
            answer = job(launch, [str(HERE / file), *words, *more])
            steps = math.ceil(IMAGES / (chosen.np * chosen.batch))
            whole: float = answer["first_batch_s"] + steps * statistics.fmean(answer["step_s"])
            return whole

        return epoch_s

    launch = mpirun(chosen.np) if chosen.np > 1 else []
    sides = {DDP: side(torchrun(chosen.np), "peers/reference.py")}
    if GPUS > 1:
        sides[DATA_PARALLEL] = side([], "peers/reference.py")
    sides |= {OURS: side(launch, "our_epoch.py", *(["--precision", "bf16"] if GPUS else []))}
    if GPUS:
        sides[f"{OURS}, compiled"] = side(launch, "our_epoch.py", "--precision", "bf16", "--compile")
    epochs_s = in_turns(sides, chosen.rounds)
    table = Table(
        name="book",
        question=f"{chosen.model}: seconds for an epoch of {IMAGES} images, and how many times as fast as DDP's:",
        columns=["side", "s per epoch", "times as fast"],
        about={"batch": chosen.batch, "ranks": chosen.np, "timed steps": chosen.steps, "goal on a GPU": ">= 5"},
    )
    for name, of_side in epochs_s.items():
        row = {"side": name, "s per epoch": round(statistics.median(of_side), 1)}
        table.add(**row, **{"times as fast": ratio(epochs_s[DDP], of_side)})
    table.write()


if __name__ == "__main__":
    main()
