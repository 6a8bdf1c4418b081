"""The lines that a person sees while a run goes on; rank 0 prints them."""

from typing import Any

from tqdm import tqdm

from hvdtrain.ranks.comm import Comm
from hvdtrain.train.reports import Report


def show_events(comm: Comm, bar: "tqdm[Any]", report: Report) -> None:
    """A line for each step that was not as it should be."""
    for step, why in report.skipped:
        say(comm, bar, f"step {step} skipped on all ranks: the {why.source} of rank {why.rank} not finite")
    for spike in report.spikes:
        jump = f"from about {spike.usual:.4g} to {spike.loss:.4g}"
        say(comm, bar, f"step {spike.step}: the loss of rank {spike.rank} jumped {jump}")


def show(comm: Comm, bar: "tqdm[Any]", epoch: int, epochs: int, metrics: dict[str, float]) -> None:
    """A line for the epoch."""
    bar.update()
    say(
        comm,
        bar,
        f"epoch {epoch + 1:>3}/{epochs}  train loss {metrics['train/loss']:.4f}  "
        f"test accuracy {metrics['eval/accuracy']:.2%}  lr {metrics['train/lr']:.4g}  "
        f"{metrics['train/images_per_s']:.0f} images/s",
    )


def say(comm: Comm, bar: "tqdm[Any]", line: str) -> None:
    """Rank 0 prints, above the bar if there is one."""
    if comm.rank != 0:
        return
    if bar.disable:
        print(line, flush=True)
    else:
        bar.write(line)
