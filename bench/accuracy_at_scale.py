"""Does accuracy survive more ranks? Recipe `book` against `scaled` on the digits, at the same batch per rank.

    python bench/accuracy_at_scale.py --out runs/accuracy_at_scale

Each size is one mpirun of real ranks; 32 and 64 are 2 ranks that accumulate 16 and 32 batches per step. Five-fold
cross-validation over all 1,797 images, times some seeds. What is done is kept in OUT/results.jsonl: the command
goes on where it was cut off. At the end it prints a table and draws OUT/accuracy_at_scale.png.

Intervals are 95 % by Student's t over the fold-and-seed pairs; folds share training images: they are a little narrow.
"""

import argparse
import dataclasses
import json
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from jobs import job_of, step_of
from scipy import stats
from sklearn.model_selection import StratifiedKFold

from hvdtrain.core.position import Position
from hvdtrain.feed.feed import Feed, Resident
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.loop import Loop
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Reports
from hvdtrain.program import assembly
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.connect import connect
from hvdtrain.tracking.gauges import Gauges, read_nothing
from hvdtrain.vision import images, models
from hvdtrain.vision.images import Images
from hvdtrain.vision.settings import RECIPES, EffnetSettings
from hvdtrain.vision.task import image_task

SIZES = {1: 1, 2: 2, 4: 4, 8: 8, 32: 2, 64: 2}  # ranks, virtual or not -> processes
FOLDS = 5

Run = tuple[str, int, int, int]  # recipe, size, fold, seed


def settings() -> argparse.Namespace:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--out", type=Path, default=Path("runs/accuracy_at_scale"))
    arguments.add_argument("--sizes", default=",".join(map(str, SIZES)))
    arguments.add_argument("--epochs", type=int, default=10)
    arguments.add_argument("--batch", type=int, default=8, help="images per rank")
    arguments.add_argument("--seeds", type=int, default=2)
    arguments.add_argument("--worker", type=int, help="the size this rank works for; set by the script itself")
    return arguments.parse_args()


def finished(out: Path) -> dict[Run, float]:
    """Accuracies by run."""
    lines = (out / "results.jsonl").read_text().splitlines() if (out / "results.jsonl").exists() else []
    results = [json.loads(line) for line in lines]
    return {(run["recipe"], run["size"], run["fold"], run["seed"]): run["accuracy"] for run in results}


def work(chosen: argparse.Namespace) -> None:
    """One rank of one size: train what is not finished yet."""
    comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
    torch.set_num_threads(1)
    done = comm.allgather([list(run) for run in finished(chosen.out)])[0]
    comm.start()
    folds = digits_in_folds()
    runs = [(recipe, fold, seed) for seed in range(chosen.seeds) for fold in range(FOLDS) for recipe in RECIPES]
    for recipe, fold, seed in runs:
        if [recipe, chosen.worker, fold, seed] in done:
            continue
        config = dataclasses.replace(
            RECIPES[recipe](),
            data="digits",
            model="efficientnet_tiny",
            pretrained=None,
            epochs=chosen.epochs,
            batch_size_per_rank=chosen.batch,
            accumulate_steps=chosen.worker // comm.size,
            seed=seed,
        )
        accuracy, steps = trained(comm, config, folds[fold])
        if comm.rank == 0:
            result = {"recipe": recipe, "size": chosen.worker, "fold": fold, "seed": seed, "accuracy": accuracy}
            with (chosen.out / "results.jsonl").open("a") as lines:
                lines.write(json.dumps({**result, "steps": steps}) + "\n")


def digits_in_folds() -> list[Images]:
    """All digits, each in the test split of one fold."""
    digits = images.digits()
    assert isinstance(digits.train, Resident)
    assert isinstance(digits.test, Resident)
    pixels = torch.cat([digits.train.tensors["images"], digits.test.tensors["images"]])
    labels = torch.cat([digits.train.tensors["labels"], digits.test.tensors["labels"]])
    folds = []
    for parts in StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(pixels, labels):
        train, test = (Resident(images=pixels[part], labels=labels[part]) for part in parts)
        folds.append(dataclasses.replace(digits, train=train, test=test))
    return folds


def trained(comm: Comm, config: EffnetSettings, split: Images) -> tuple[float, int]:
    """The test accuracy, 0 to 1, after all epochs on this split, and how many steps these were."""
    loop = loop_over(comm, config, split)
    steps_per_epoch = loop.feed.sizes.steps_per_epoch
    for epoch in range(config.epochs):
        for _ in loop.steps(Position(step=epoch * steps_per_epoch, epoch=epoch)):
            pass
    steps = config.epochs * steps_per_epoch
    return loop.evaluate(Position(step=steps))["accuracy"], steps


def loop_over(comm: Comm, config: EffnetSettings, split: Images) -> Loop:
    """The loop of a run over this split on CPUs, which keeps no record."""
    cpu = torch.device("cpu")
    task = image_task(config, split, cpu)
    torch.manual_seed(config.seed)
    model = models.build(config.model, classes=10)
    job = job_of(comm, config, cpu, model=model, task=task, train=split.train)
    rate = assembly.rate_of(config, job)
    step = step_of(config, job, lr=rate.peak)
    torch.manual_seed((config.seed << 16) + comm.rank)
    return Loop(
        step=step,
        feed=Feed(split.train, task, comm, job.sizes, seed=config.seed, device=cpu),
        test=split.test,
        rate=rate,
        reports=Reports(comm, lambda _: Gauges(read_nothing), task, every_steps=config.report_every_steps, device=cpu),
        progress=Progress(Position()),
        epochs=config.epochs,
        hooks=[Limits(step, max_skipped_steps=config.max_skipped_steps, check_replicas_every=0)],
    )


def interval(values: list[float]) -> float:
    """Half the width of the 95 % interval of the mean."""
    if len(values) < 2:
        return math.nan
    spread = statistics.stdev(values) / math.sqrt(len(values))
    return float(stats.t.ppf(0.975, len(values) - 1)) * spread


def table(results: dict[Run, float], sizes: list[int]) -> list[tuple[str, int, float, float, float, float, int]]:
    """Recipe, ranks, accuracy, its interval, change against 1 rank (by pairs), its interval, n; in percent."""
    rows = []
    for recipe in RECIPES:
        for size in sizes:
            pairs = [run[2:] for run in results if run[:2] == (recipe, size)]
            present = [pair for pair in pairs if (recipe, 1, *pair) in results]
            if not present:
                continue
            here = [100 * results[(recipe, size, *pair)] for pair in present]
            change = [value - 100 * results[(recipe, 1, *pair)] for value, pair in zip(here, present, strict=True)]
            mean = statistics.mean
            rows.append((recipe, size, mean(here), interval(here), mean(change), interval(change), len(here)))
    return rows


def draw(rows: list[tuple[str, int, float, float, float, float, int]], picture: Path) -> None:
    """Accuracy against ranks, with intervals, one line for each recipe."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for recipe, colour in zip(RECIPES, ("tab:blue", "tab:red"), strict=True):
        own = [row for row in rows if row[0] == recipe]
        sizes, accuracies, widths = ([row[column] for row in own] for column in (1, 2, 3))
        axes.errorbar(sizes, accuracies, yerr=widths, marker="o", capsize=4, color=colour, label=recipe)
    axes.set_xscale("log", base=2)
    ticks = sorted({row[1] for row in rows})
    axes.set_xticks(ticks, [str(tick) if tick <= 8 else f"{tick}*" for tick in ticks])
    axes.set_xlabel("ranks, same batch per rank   (* by accumulation on 2)")
    axes.set_ylabel("test accuracy, %")
    axes.grid(alpha=0.3)
    axes.legend(title="recipe")
    figure.savefig(picture, dpi=120)


def main() -> None:
    chosen = settings()
    if chosen.worker is not None:
        work(chosen)
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    sizes = [int(size) for size in chosen.sizes.split(",")]
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "MPIEXEC_TIMEOUT": "7200",
    }
    for size in sizes:
        launch = ["mpirun", "--oversubscribe", "--bind-to", "none", "-np", str(SIZES[size]), sys.executable, __file__]
        words = ["--out", str(chosen.out), "--epochs", str(chosen.epochs), "--batch", str(chosen.batch)]
        words += ["--seeds", str(chosen.seeds)]
        if subprocess.run([*launch, *words, "--worker", str(size)], env=env, check=False).returncode != 0:
            sys.exit(f"{size} ranks failed")
    rows = table(finished(chosen.out), sizes)
    print("| recipe | ranks | test accuracy % | change against 1 rank, points | n |\n|---|--:|--:|--:|--:|")
    for recipe, size, accuracy, width, change, change_width, count in rows:
        mark = "" if size <= 8 else "*"
        against = "" if size == 1 else f"{change:+.2f} ± {change_width:.2f}"
        print(f"| {recipe} | {size}{mark} | {accuracy:.2f} ± {width:.2f} | {against} | {count} |")
    draw(rows, chosen.out / "accuracy_at_scale.png")


if __name__ == "__main__":
    main()
