"""The run folder: settings, environment, metrics, TensorBoard events and the result.

Every file is whole at any time: JSON is written beside its target and renamed, a metrics line is flushed as it is
written. Only rank 0 writes, but for its own file each in ranks/.
"""

import hashlib
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from torch import nn
from torch.utils.tensorboard import SummaryWriter

from hvdtrain.exits import BadInput

FINISHED = "finished"
_OURS = ("*.json", "*.part", "metrics.jsonl", "ranks", "events.out.tfevents.*")


def prepare(folder: Path, *, overwrite: bool) -> None:
    """Make an empty run folder; called by rank 0 alone.

    Raises BadInput where it cannot be written, holds a finished run (unless `overwrite`) or something else.
    """
    try:
        if folder.is_dir() and any(folder.iterdir()):
            found = sorted(folder.iterdir())
            foreign = [path.name for path in found if not any(path.match(ours) for ours in _OURS)]
            if foreign or not (folder / "ranks").is_dir():
                raise BadInput(
                    f"{folder} holds what is not a run's, as {(foreign or [found[0].name])[0]}: give another --run"
                )
            if _is_finished(folder) and not overwrite:
                raise BadInput(f"{folder} holds a finished run: give another --run, or --overwrite to replace it")
            shutil.rmtree(folder)
        (folder / "ranks").mkdir(parents=True)
        probe = folder / "config.json.part"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise BadInput(
            f"the run folder {folder} cannot be written ({error.strerror or error}): give another --runs-dir"
        ) from error


def _is_finished(folder: Path) -> bool:
    try:
        return bool(json.loads((folder / "result.json").read_text())["exit_reason"] == FINISHED)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def write_json(path: Path, value: Any) -> None:
    """Write beside the target and rename, so that a reader never sees half a file."""
    beside = path.with_name(path.name + ".part")
    beside.write_text(json.dumps(value, indent=2, default=str) + "\n")
    beside.replace(path)


class Tracker:
    """The run folder's metrics, events and result; on other ranks than 0 it writes nothing.

    `result` is what result.json will hold: `epoch_done` keeps it up to date, `conclude` writes it.
    """

    def __init__(self, folder: Path, *, writes: bool, result: dict[str, Any]) -> None:
        self.folder = folder
        self.result = {
            **result,
            "steps": 0,
            "wall_time_s": None,
            "train_time_s": 0.0,
            "train_images_per_s": None,
            "eval_accuracy": None,
            "eval_loss": None,
            "skipped_steps": 0,
            "exit_reason": None,
        }
        self._started = time.perf_counter()
        self._images = 0
        self._lines = (folder / "metrics.jsonl").open("a") if writes else None
        self._events = SummaryWriter(str(folder)) if writes else None

    def describe(self, **documents: Any) -> None:
        """Write each document as <name>.json and show it on TensorBoard's text page."""
        if self._events is None:
            return
        for name, document in documents.items():
            write_json(self.folder / f"{name}.json", document)
            self._events.add_text(name, f"```\n{json.dumps(document, indent=2, default=str)}\n```")

    def epoch_done(
        self, *, steps: int, images: int, train_s: float, skipped: int, train: dict[str, float], test: dict[str, float]
    ) -> dict[str, float]:
        """Report an epoch of `steps` steps over `images` images that took `train_s` seconds; return the metrics."""
        result = self.result
        self._images += images
        result["steps"] += steps
        result["train_time_s"] += train_s
        result["train_images_per_s"] = self._images / result["train_time_s"]
        result["skipped_steps"] += skipped
        result["eval_accuracy"], result["eval_loss"] = test["accuracy"], test["loss"]
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= {"train/images_per_s": images / train_s, "train/skipped_steps": result["skipped_steps"]}
        metrics |= {f"eval/{name}": value for name, value in test.items()}
        self._write(result["steps"], metrics)
        return metrics

    def _write(self, step: int, metrics: dict[str, float]) -> None:
        if self._lines is None or self._events is None:
            return
        seconds = time.perf_counter() - self._started
        self._lines.write(json.dumps({"step": step, "seconds": round(seconds, 3), **metrics}) + "\n")
        self._lines.flush()
        for name, value in metrics.items():
            self._events.add_scalar(name, value, step)
        self._events.add_scalar("eval/accuracy_by_second", metrics["eval/accuracy"], round(seconds))
        self._events.flush()

    def conclude(self, reason: str) -> None:
        """Write result.json with this exit reason and close the files, once; later reasons are ignored."""
        if self.result["exit_reason"] is not None:
            return
        self.result["exit_reason"] = reason
        self.result["wall_time_s"] = time.perf_counter() - self._started
        if self._lines is not None and self._events is not None:
            write_json(self.folder / "result.json", self.result)
            self._lines.close()
            self._events.close()


def environment() -> dict[str, Any]:
    """Versions, host, command and commit of this process."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        **versions(),
        "command": [sys.executable, *sys.argv],
        "commit": _commit(),
        "horovod_settings": {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")},
    }


def versions() -> dict[str, str | None]:
    """Python and the packages whose version changes a result; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "horovod", "mpi4py", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    where = Path(__file__).parent
    done = subprocess.run(
        ["git", "-C", str(where), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or None


def code_hash() -> str:
    """SHA-256 over this package's source files."""
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def weights_hash(model: nn.Module) -> str:
    """SHA-256 over the model's parameters."""
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().float().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
