"""The run folder: settings, environment, metrics, TensorBoard events and the result.

Every file is whole at any time: JSON is written beside its target and renamed, a metrics line is flushed as it is
written. Only rank 0 writes, but for its own file each in ranks/.
"""

import hashlib
import json
import math
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


def share(folder: Path) -> None:
    """Make the part of the run folder that every rank writes to, on hosts that do not share rank 0's."""
    try:
        (folder / "ranks").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput(
            f"the run folder {folder} cannot be written ({error.strerror}): give another --runs-dir"
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
            "loss_spikes": 0,
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

    def count(self, *, skipped: list[dict[str, Any]], spikes: list[dict[str, Any]]) -> None:
        """Note the steps that were skipped and the losses that jumped, one mapping for each."""
        self.result["skipped_steps"] += len(skipped)
        self.result["loss_spikes"] += len(spikes)
        for kind, events in (("skipped", skipped), ("spike", spikes)):
            for event in events:
                self._line({"event": kind, **event})

    def epoch_done(
        self, *, steps: int, images: int, train_s: float, train: dict[str, float], test: dict[str, float]
    ) -> dict[str, float]:
        """Report an epoch of `steps` steps over `images` images that took `train_s` seconds; return the metrics."""
        result = self.result
        self._images += images
        result["steps"] += steps
        result["train_time_s"] += train_s
        result["train_images_per_s"] = self._images / result["train_time_s"]
        result["eval_accuracy"], result["eval_loss"] = test["accuracy"], test["loss"]
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= {f"train/{name}": result[name] for name in ("skipped_steps", "loss_spikes")}
        metrics |= {"train/images_per_s": images / train_s}
        metrics |= {f"eval/{name}": value for name, value in test.items()}
        seconds = time.perf_counter() - self._started
        self._line({"step": result["steps"], "seconds": round(seconds, 3), **metrics})
        if self._events is not None:
            for name, value in metrics.items():
                self._events.add_scalar(name, value, result["steps"])
            self._events.add_scalar("eval/accuracy_by_second", metrics["eval/accuracy"], round(seconds))
            self._events.flush()
        return metrics

    def _line(self, values: dict[str, Any]) -> None:
        if self._lines is None:
            return
        self._lines.write(json.dumps(_finite(values)) + "\n")
        self._lines.flush()

    def conclude(self, reason: str) -> None:
        """Write result.json with this exit reason and close the files, once; later reasons are ignored."""
        if self.result["exit_reason"] is not None:
            return
        self.result["exit_reason"] = reason
        self.result["wall_time_s"] = time.perf_counter() - self._started
        if self._lines is not None and self._events is not None:
            write_json(self.folder / "result.json", _finite(self.result))
            self._lines.close()
            self._events.close()


def _finite(values: dict[str, Any]) -> dict[str, Any]:
    """None in place of NaN and infinity, which JSON does not have."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }


def environment() -> dict[str, Any]:
    """Versions, host, command and commit of this process."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        **versions(),
        "command": [sys.executable, *sys.argv],
        "commit": _commit(),
        "horovod_settings": {name: value for name, value in os.environ.items() if name.startswith("HOROVOD_")},
        "nccl_settings": {name: value for name, value in os.environ.items() if name.startswith("NCCL_")},
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
