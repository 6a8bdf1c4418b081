"""The run folder: settings, environment, metrics, TensorBoard events and the result.

Every file is whole at any time: JSON is written beside its target and renamed, a metrics line or an event at once.
Only rank 0 writes, but for its own file each in ranks/.
"""

import contextlib
import hashlib
import io
import json
import math
import os
import platform
import re
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil

from hvdtrain.checkpoint.files import CHECKPOINT_WRITE
from hvdtrain.record import events, markdown
from hvdtrain.record.files import (
    LOG_WRITE,
    Appends,
    Nowhere,
    RecordFile,
    reserve,
    write_json,
    write_reserved,
    write_whole,
)
from hvdtrain.safety import exits
from hvdtrain.safety.guard import Guard
from hvdtrain.train.reports import Report

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# Their last values are the metrics on TensorBoard's HPARAMS page.
HPARAM_METRICS = {
    "eval/accuracy": "test accuracy",
    "eval/loss": "test loss",
    "train_by_epoch/time_s": "training time s",
    "train_by_epoch/images_per_s": "images/s, last epoch",
}

# Names of variables and options whose values are not written down.
_SECRET = re.compile(r"[\w-]*(TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|KEY)[\w-]*", re.IGNORECASE)

# Counts and sums that go on in a run that is resumed.
_REMEMBERED = (
    *("steps", "train_time_s", "train_images_per_s", "eval_accuracy", "eval_loss", "best_accuracy"),
    *("skipped_steps", "loss_spikes", "unreadable_images", "resumed"),
)


class Tracker:
    """The run folder's metrics, events and result; on other ranks than 0 it writes nothing.

    `result` is what result.json will hold: `report` and `epoch_done` keep it up to date, `conclude` writes it. What
    cannot be written is counted there and told once; no call raises for it. With the `memory` of an earlier process it
    goes on from there: what that one wrote later is cut off.
    """

    def __init__(
        self, folder: Path, *, writes: bool, result: dict[str, Any], memory: Mapping[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.result = {
            **result,
            "steps": 0,
            "wall_time_s": None,
            "train_time_s": 0.0,
            "train_images_per_s": None,
            "eval_accuracy": None,
            "eval_loss": None,
            "best_accuracy": None,
            "skipped_steps": 0,
            "loss_spikes": 0,
            "unreadable_images": 0,
            "log_write_failures": 0,
            "checkpoint_write_failures": 0,
            "resumed": 0,
            "exit_reason": None,
        }
        self._started = time.perf_counter()
        self._images = 0
        self._writes = writes
        self._resumed = memory is not None
        self.guard = Guard()
        events_file, lines_bytes, events_bytes = events.file_name(), None, None
        if memory is not None:
            self.result |= {name: memory["result"][name] for name in _REMEMBERED} | {
                "resumed": memory["result"]["resumed"] + 1
            }
            self._started -= memory["wall_time_s"]
            self._images = memory["images"]
            self.guard.counts.update(memory["failures"])
            events_file = Path(memory["events_file"]).name  # a stranger's may lead elsewhere
            lines_bytes, events_bytes = memory["lines_bytes"], memory["events_bytes"]
        self._facts: dict[str, Any] = {}
        self._lines: Appends = Nowhere()
        self._events: Appends = Nowhere()
        if writes:
            self._lines = RecordFile(folder / "metrics.jsonl", self.guard, keep=lines_bytes)
            self._events = RecordFile(folder / events_file, self.guard, keep=events_bytes)
            self._events_file = events_file
            if not self._events.size():
                self._events.append(events.version())
            self._try(folder / "result.json", reserve)

    def describe(self, *, columns: Sequence[events.Column], command: Sequence[str], **documents: Any) -> None:
        """Write each document as <name>.json, and show it and the command on TensorBoard's text page.

        `columns` are the settings by which runs are compared on its HPARAMS page.
        """
        for name, document in documents.items():
            self.document(f"{name}.json", document)
        if self._resumed:
            return  # TensorBoard knows the run already
        self._events.append(events.hparams_start(columns, HPARAM_METRICS))
        self._events.append(events.text("command", f"`{shlex.join(command)}`"))
        for name, document in documents.items():
            self._events.append(events.text(name, markdown.tables(document)))

    def memory(self) -> dict[str, Any]:
        """What a later process needs to go on from here, as JSON."""
        return {
            "result": {name: self.result[name] for name in _REMEMBERED},
            "wall_time_s": time.perf_counter() - self._started,
            "images": self._images,
            "failures": dict(self.guard.counts),
            "events_file": self._events_file,
            "lines_bytes": self._lines.size(),
            "events_bytes": self._events.size(),
        }

    def document(self, name: str, value: Any) -> None:
        """Rank 0 writes a JSON file of this name into the run folder."""
        if self._writes:
            self._try(self.folder / name, lambda path: write_json(path, value))

    def rank_facts(self, rank: int, **facts: Any) -> None:
        """Every rank adds to the file of its own facts."""
        self._facts |= {"rank": rank, **facts}
        self._try(self.folder / "ranks" / f"rank-{rank}.json", lambda path: write_json(path, self._facts))

    def picture(self, name: str, picture: "Figure | bytes", step: int) -> None:
        """Write a matplotlib figure, or a PNG's bytes, as <name>.png and show it on TensorBoard's images page."""
        if not self._writes:
            return
        png = picture if isinstance(picture, bytes) else _drawn(picture)
        self._try(self.folder / f"{name}.png", lambda path: write_whole(path, png))
        self._events.append(events.image(name, png, step))

    def report(self, report: Report) -> None:
        """Take in what all ranks have said at a report step."""
        self.result["steps"] = report.step
        self.result["skipped_steps"] += len(report.skipped)
        self.result["loss_spikes"] += len(report.spikes)
        self.result["unreadable_images"] += report.unreadable
        for step, why in report.skipped:
            self._line({"event": "skipped", "step": step, **asdict(why)})
        for spike in report.spikes:
            self._line({"event": "spike", **asdict(spike)})
        numbers = {**report.scalars(), **self._counts()}
        self._line({"step": report.step, "seconds": self._seconds(), **numbers})
        self._events.append(events.scalars(numbers, report.step))

    def epoch_done(
        self, epoch: int, *, images: int, train_s: float, train: Mapping[str, float], test: Mapping[str, float]
    ) -> dict[str, float]:
        """Take in epoch 1, 2, ... over `images` images that took `train_s` seconds; return its metrics.

        `train` and `test` are means over the epoch, by name.
        """
        result = self.result
        self._images += images
        result["train_time_s"] += train_s
        result["train_images_per_s"] = self._images / result["train_time_s"]
        result["eval_accuracy"], result["eval_loss"] = test["accuracy"], test["loss"]
        result["best_accuracy"] = max(test["accuracy"], result["best_accuracy"] or 0.0)
        metrics = {f"train/{name}": value for name, value in train.items()}
        metrics |= {**self._counts(), "train/images_per_s": images / train_s, "train/epoch_s": train_s}
        metrics |= {f"eval/{name}": value for name, value in test.items()}
        seconds = self._seconds()
        self._line({"step": result["steps"], "seconds": seconds, "epoch": epoch, **metrics})
        # Over an epoch: apart from the curves of report steps, which would jump.
        scalars = {
            "train_by_epoch/loss": train["loss"],
            "train_by_epoch/accuracy": train["accuracy"],
            "train_by_epoch/epoch_s": train_s,
            "train_by_epoch/images_per_s": images / train_s,
            "train_by_epoch/time_s": result["train_time_s"],
            "eval/accuracy": test["accuracy"],
            "eval/loss": test["loss"],
        }
        self._events.append(events.scalars(scalars, result["steps"]))
        self._events.append(events.scalars({"eval/accuracy_by_second": test["accuracy"]}, round(seconds)))
        return metrics

    def conclude(self, reason: str) -> None:
        """Write result.json with this exit reason and close the files, once; later reasons are ignored."""
        if self.result["exit_reason"] is not None:
            return
        self.result["exit_reason"] = reason
        self.result["wall_time_s"] = time.perf_counter() - self._started
        self._events.append(events.hparams_end(finished=reason == exits.FINISHED))
        self._lines.close()
        self._events.close()
        if self._writes:
            self.result["log_write_failures"] = self.guard.counts[LOG_WRITE]
            self.result["checkpoint_write_failures"] = self.guard.counts[CHECKPOINT_WRITE]
            self._try(self.folder / "result.json", lambda path: write_reserved(path, _finite(self.result)))
            exits.report(exit_reason=reason)

    def _counts(self) -> dict[str, int]:
        return {f"train/{name}": self.result[name] for name in ("skipped_steps", "loss_spikes")}

    def _seconds(self) -> float:
        return round(time.perf_counter() - self._started, 3)

    def _line(self, values: dict[str, Any]) -> None:
        self._lines.append((json.dumps(_finite(values)) + "\n").encode())

    def _try(self, path: Path, write: Callable[[Path], None]) -> None:
        with self.guard(LOG_WRITE, path):
            write(path)


def _drawn(figure: "Figure") -> bytes:
    png = io.BytesIO()
    figure.savefig(png, format="png", bbox_inches="tight")
    return png.getvalue()


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
        "command": _command(),
        "commit": _commit(),
        "horovod_settings": _variables("HOROVOD_"),
        "nccl_settings": _variables("NCCL_"),
    }


def _variables(prefix: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(prefix) and not _SECRET.fullmatch(name)
    }


def _command() -> list[str]:
    """This process's words, with those of the launcher before them where it is on the same host.

    In place of a secret's value, as in mpirun -x TOKEN=VALUE, stands "...".
    """
    command = sys.orig_argv
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            if len(words) > len(command) > 1 and words[1 - len(command) :] == command[1:]:
                command = words
    return [_without_secret(word) for word in command]


def _without_secret(word: str) -> str:
    name, with_value, _ = word.partition("=")
    return f"{name}=..." if with_value and _SECRET.fullmatch(name) else word


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
    """The commit that the image was built from, or git's answer; None where there is neither."""
    if (built := os.environ.get("HVDTRAIN_COMMIT")) is not None:
        return built
    where = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(where), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def code_hash() -> str:
    """SHA-256 over this package's source files."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()
