"""Checks of a step's files: figures if its claim holds, AssertionError if it is wrong."""

import json
import re
from pathlib import Path
from typing import Any

Figures = dict[str, Any]


def last_json(_: Path, output: str) -> Figures:
    """Return the figures that a part of measure.py has printed."""
    line = next(line for line in reversed(output.splitlines()) if line.startswith("{"))
    figures: Figures = json.loads(line)
    return figures


def document(folder: Path, run: str, name: str = "result", program: str = "effnet") -> Figures:
    """Return a JSON document of a run folder."""
    found: Figures = json.loads((folder / "runs" / program / run / f"{name}.json").read_text())
    return found


def finished(run: str, program: str = "effnet") -> Any:
    """Return a check that a run has finished; its figures are speed, accuracy, memory and the device."""

    def check(folder: Path, _: str) -> Figures:
        result = document(folder, run, program=program)
        assert result["exit_reason"] == "finished", result["exit_reason"]
        names = ("train_images_per_s", "eval_accuracy", "wall_time_s", "checkpoint_hold_s", "memory")
        device = document(folder, run, "placement", program)["ranks"][0]["device"]
        return {"device": device, **{name: result[name] for name in names if name in result}}

    return check


def saved_on_request(run: str) -> Any:
    """Return a check that a run has saved before its end, because of a signal."""

    def check(folder: Path, _: str) -> Figures:
        result = document(folder, run)
        checkpoints = sorted(path.name for path in (folder / "runs/effnet" / run / "checkpoints").glob("step-*"))
        assert result["exit_reason"] == "preempted", result["exit_reason"]
        assert checkpoints[-1] == f"step-{result['steps']:09d}", checkpoints
        return {"step": result["steps"], "checkpoint_hold_s": result["checkpoint_hold_s"]}

    return check


def losses(folder: Path, run: str) -> list[float]:
    """Return the training losses of a run's reports."""
    lines = (folder / "runs/effnet" / run / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["train/loss"] for row in rows if "train/loss" in row and "eval/loss" not in row]


def same_curve(here: Path, run: str, there: Path, other: str, *, near: float, far: float = 0.2) -> Figures:
    """Require that the first five losses of two runs differ by less than `near`, and all by less than `far`."""
    ours, theirs = losses(here, run), losses(there, other)
    assert ours, "no losses"
    assert len(ours) == len(theirs), f"{len(ours)} and {len(theirs)} losses"
    differences = [abs(one - reference) / abs(reference) for one, reference in zip(ours, theirs, strict=True)]
    figures: Figures = {"first five differ by": max(differences[:5]), "all differ by": max(differences)}
    figures |= {"steps": len(ours), "from, to": [ours[0], ours[-1]]}
    assert figures["first five differ by"] < near, figures
    assert figures["all differ by"] < far, figures
    return figures


def near(tolerance: float) -> Any:
    """Return a check that hvdtrain's losses differ from a plain loop's by less than this."""

    def check(folder: Path, output: str) -> Figures:
        figures = last_json(folder, output)
        assert figures["a loss differs by at most"] < tolerance, figures
        return figures

    return check


def tested(_: Path, output: str) -> Figures:
    """Return what pytest counts; a run in which nothing passed is wrong."""
    line = next(line for line in reversed(output.splitlines()) if re.search(r"\d+ (passed|failed|skipped)", line))
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed|skipped|errors?)", line)}
    assert counts.get("passed"), counts
    return counts


def rows(name: str) -> Any:
    """Return a check whose figures are the rows of a case of bench/run.py."""

    def check(folder: Path, _: str) -> Figures:
        found: Figures = {"rows": json.loads((folder / f"build/bench/{name}.json").read_text())["rows"]}
        return found

    return check


def nccl_built(folder: Path, output: str) -> Figures:
    """Return the first facts; without NCCL in Horovod they are wrong."""
    figures = last_json(folder, output)
    assert figures["nccl_built"], figures
    assert figures["mpi_built"], figures
    return figures


def sums_are_right(_: Path, output: str) -> list[str]:
    """Return the lines of both ranks that say so."""
    found = re.findall(r"rank \d: .* are right", output)
    assert len(found) == 6, found
    return found
