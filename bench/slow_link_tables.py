"""What bench/slow_link.py makes of its answers about the digits: tables and a picture."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accuracy_at_scale import interval
from pairs import Table, ratio

Learned = dict[str, list[float]]  # after each epoch: accuracy, train_s


def accuracy_table(learned: Mapping[str, Mapping[str, Learned]], first: str) -> Table:
    """The last accuracies by variant, and what they differ from the first one's with the same fold and seed."""
    table = Table(
        name="slow_link_accuracy",
        question="Test accuracy on the digits after 10 epochs, in percent; change in points by pairs:",
        columns=["variant", "test accuracy %", f"change against {first}", "epochs to 97 %", "n"],
    )
    for name, runs in learned.items():
        last = [100 * run["accuracy"][-1] for run in runs.values()]
        change = [100 * (run["accuracy"][-1] - learned[first][key]["accuracy"][-1]) for key, run in runs.items()]
        epochs = [float(reached) for run in runs.values() if (reached := epochs_to(run, 0.97))]
        table.add(
            **{
                "variant": name,
                "test accuracy %": f"{statistics.mean(last):.2f} ± {interval(last):.2f}",
                f"change against {first}": f"{statistics.mean(change):+.2f} ± {interval(change):.2f}",
                "epochs to 97 %": f"{statistics.median(epochs):g} ({len(epochs)} of {len(last)})" if epochs else "-",
                "n": len(last),
            }
        )
    return table


def epochs_to(run: Learned, goal: float) -> int | None:
    """How many it took; None if it never came there."""
    return next((number for number, accuracy in enumerate(run["accuracy"], 1) if accuracy >= goal), None)


def seconds_to(run: Learned, goal: float) -> float:
    """Until the epoch that reached it; infinite if none did."""
    epochs = epochs_to(run, goal)
    return run["train_s"][epochs - 1] if epochs else float("inf")


def time_table(timed: Mapping[str, Mapping[str, Learned]], first: str, goal: float) -> Table:
    """Seconds until the accuracy, and how much sooner than the first."""
    table = Table(
        name="slow_link_time",
        question=f"Seconds to {goal:.0%} on the digits at 10 Mbit/s:",
        columns=["variant", "seconds", "epochs", "s per epoch", "times as fast"],
    )
    slow = [seconds_to(run, goal) for run in timed[first].values()]
    for name, runs in timed.items():
        seconds = [seconds_to(run, goal) for run in runs.values()]
        per_epoch = [run["train_s"][-1] / len(run["train_s"]) for run in runs.values()]
        table.add(
            **{
                "variant": name,
                "seconds": " ".join(f"{one:.0f}" for one in seconds),
                "epochs": " ".join(str(epochs_to(run, goal) or "-") for run in runs.values()),
                "s per epoch": round(statistics.median(per_epoch), 1),
                "times as fast": ratio(slow, seconds),
            }
        )
    return table


def draw(
    rows: Sequence[Mapping[str, Any]], timed: Mapping[str, Mapping[str, Learned]], goal: float, picture: Path
) -> None:
    """Bars of the time of a batch at 100 Mbit/s, and accuracy against time at 10 Mbit/s."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.4), layout="constrained")
    slow = [row for row in rows if row["link"].startswith("100mbit")]
    for place, hosts in enumerate(("2 x 1", "2 x 2")):
        own = [row for row in slow if row["hosts x ranks"] == hosts]
        heights = [number + 0.4 * place for number in range(len(own))]
        left.barh(heights, [row["ms per batch"] for row in own], height=0.4, label=f"{hosts} ranks")
        left.set_yticks([height - 0.2 for height in heights], [row["variant"] for row in own])
    left.invert_yaxis()
    left.set_xlabel("ms per batch, efficientnet_b0, 100 Mbit/s")
    left.legend()
    for name, runs in timed.items():
        run = next(iter(runs.values()))
        right.plot(run["train_s"], [100 * accuracy for accuracy in run["accuracy"]], marker=".", label=name)
    right.axhline(100 * goal, color="gray", linestyle=":")
    right.set_xscale("log")
    right.set_xlabel("seconds of training, efficientnet_tiny, 10 Mbit/s")
    right.set_ylabel("test accuracy on the digits, %")
    right.grid(alpha=0.3)
    right.legend()
    figure.savefig(picture, dpi=120)
