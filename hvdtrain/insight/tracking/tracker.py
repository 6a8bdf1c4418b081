"""The run folder: settings, environment, metrics, TensorBoard events and the result.

Every file is complete at any time: JSON files are written under a temporary name and renamed, metrics lines and events
in one write. Only rank 0 writes, except for each rank's own file in ranks/.
"""

import io
import json
import math
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from textwrap import indent
from typing import TYPE_CHECKING, Any

from hvdtrain.core.task import Task
from hvdtrain.insight.tracking import events
from hvdtrain.insight.tracking.console import format_behind
from hvdtrain.insight.tracking.files import RecordFile, reserve, to_json, write_json, write_reserved
from hvdtrain.loop.hooks import EpochDone
from hvdtrain.loop.reports import Report
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.files import write_atomically
from hvdtrain.settings.safety.guard import CHECKPOINT_WRITE, LOG_WRITE, Guard

CONCLUDE_S = 10.0  # for another thread; a file system may hang

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Tracker:
    """Writes the run folder's metrics, events and result; only the writer, rank 0, creates and writes files.

    `result` becomes result.json: `record` and `record_epoch` update it, `conclude` writes it. A failed write is
    counted there and reported once; no call raises an exception for it. With the `memory` of an earlier process the
    tracker continues from that point: what that process wrote later is truncated.
    """

    _lines: RecordFile  # on the rank that writes
    _events: RecordFile

    def __init__(
        self,
        folder: Path,
        *,
        is_writer: bool,
        task: Task,
        result: dict[str, Any],
        memory: Mapping[str, Any] | None = None,
    ) -> None:
        self.folder = folder
        self.task = task
        self._metrics = dict.fromkeys(("loss", *task.means, task.best))  # that are known before the first report
        self._first = {  # the result of a new run, as far as a resumed run continues it
            "steps": 0,
            "train_time_s": 0.0,
            f"train_{task.unit}_per_s": None,
            **{f"eval_{name}": None for name in self._metrics},
            f"best_{task.best}": None,
            "skipped_steps": 0,
            "loss_spikes": 0,
            f"unreadable_{task.unit}": 0,
            "resumed": 0,
            "energy_wh": None,  # of all GPUs, if their power was measured
            "straggler": None,  # the last reported straggler
            "stopped": None,  # why the program has finished early
        }
        self.result = {
            **result,
            **self._first,
            "wall_time_s": None,
            "checkpoint_hold_s": None,  # how long a checkpoint has held the training (median)
            "higher_is_better": task.higher_is_better,
            "log_write_failures": 0,
            "checkpoint_write_failures": 0,
            "memory": None,  # of a run that ended early: ranks could not exchange it
            "exit_reason": None,
        }
        self._concluding = threading.Lock()
        self._started = time.perf_counter()
        self._count, self._counted_s = 0.0, 0.0  # samples with this number of ranks, and their time
        self.is_writer = is_writer
        self._is_resumed = memory is not None
        self._has_row = memory is not None and bool(memory.get("has_row", True))  # on the HPARAMS page
        self.guard = Guard()
        self._logged: dict[str, int] = {}  # the last step of each name that the program has recorded
        events_file, lines_bytes, events_bytes = events.file_name(), None, None
        if memory is not None:
            self.result |= self._resumable(memory["result"])
            self.result["resumed"] += 1
            self._started -= memory["wall_time_s"]
            if memory.get("np", result.get("np")) == result.get("np"):
                self._count = memory["count"]
                self._counted_s = memory.get("counted_s", self.result["train_time_s"])
            elif part := memory.get("position"):  # what other ranks have trained of this epoch does not count
                self._count, self._counted_s = -float(part["visited"]), -part["train_s"]
            self.guard.counts.update(memory["failures"])
            self._logged.update(memory.get("logged", {}))
            events_file = Path(memory["events_file"]).name  # an untrusted path may lead elsewhere
            lines_bytes, events_bytes = memory["lines_bytes"], memory["events_bytes"]
        self._facts: dict[str, Any] = {}
        self._saves_s: list[float] = []
        self._power_at_s = time.perf_counter()
        self._power_w: float | None = None  # at the last report
        self._settings: Mapping[str, Any] = {}  # of a new run's row on the HPARAMS page, until it is written
        if is_writer:
            self._lines = RecordFile(folder / "metrics.jsonl", self.guard, keep_bytes=lines_bytes)
            self._events = RecordFile(folder / events_file, self.guard, keep_bytes=events_bytes)
            self._events_file = events_file
            if not self._events.size():
                self._events.append(events.version())
            self._write(folder / "result.json", reserve)

    def record_event(self, event: Mapping[str, Any], scalars: Mapping[str, float]) -> None:
        """Write an event and these scalars at the step of the last report, on rank 0."""
        if self.is_writer:
            self._write_line(event)
            self._events.append(events.scalars(scalars, self.result["steps"]))

    def describe(self, *, settings: Mapping[str, Any], command: Sequence[str], **documents: Any) -> None:
        """Write each document as <name>.json, and show it and the command on TensorBoard's text page.

        `settings` are those by which runs are compared on its HPARAMS page.
        """
        for name, document in documents.items():
            self.write_document(f"{name}.json", document)
        if not self.is_writer:
            return
        if not self._has_row:
            self._settings = settings
        if self._is_resumed:
            return  # it is already in TensorBoard
        self.write_text("command", f"`{shlex.join(command)}`")
        for name, document in documents.items():
            self.write_text(name, indent(to_json(document).decode(), "    "))  # Markdown's block of code

    def _begin_row(self, metrics: Iterable[str]) -> None:
        """Begin the row of a new run on the HPARAMS page, once; the first report names all metrics."""
        if self._settings:
            titles = {f"eval/{name}": f"test {name}" for name in dict.fromkeys((self.task.best, *metrics))}
            titles["train_by_epoch/time_s"] = "training time s"
            titles[f"train_by_epoch/{self.task.unit}_per_s"] = f"{self.task.unit}/s, last epoch"
            self._events.append(events.hparams_start(self._settings, titles))
            self._has_row = True
        self._settings = {}

    def memory(self) -> dict[str, Any]:
        """Return the state that a later process needs to continue, as JSON."""
        return {
            "result": self._resumable(self.result),
            "wall_time_s": time.perf_counter() - self._started,
            "np": self.result.get("np"),
            "count": self._count,
            "counted_s": self._counted_s,
            "failures": dict(self.guard.counts),
            "logged": dict(self._logged),
            "events_file": self._events_file,
            "has_row": self._has_row,
            "lines_bytes": self._lines.size(),
            "events_bytes": self._events.size(),
        }

    def _resumable(self, result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the part of a result that continues in a resumed run."""
        return {name: value for name, value in result.items() if name in self._first or name.startswith("eval_")}

    def write_document(self, name: str, value: Any) -> None:
        """Write a JSON file of this name into the run folder, on rank 0."""
        if self.is_writer:
            self._write(self.folder / name, lambda path: write_json(path, value))

    def write_rank_facts(self, rank: int, **facts: Any) -> None:
        """Add facts to the rank's own file."""
        self._facts |= {"rank": rank, **facts}
        self._write(self.folder / "ranks" / f"rank-{rank}.json", lambda path: write_json(path, self._facts))

    def write_picture(self, name: str, figure: "Figure") -> None:
        """Write a figure of matplotlib as <name>.png and show it on TensorBoard's images page, on rank 0."""
        if self.is_writer:
            png = io.BytesIO()
            figure.savefig(png, format="png", bbox_inches="tight")
            self._write(self.folder / f"{name}.png", lambda path: write_atomically(path, png.getvalue()))
            self._events.append(events.image(name, png.getvalue(), self.result["steps"]))

    def write_text(self, name: str, markdown: str) -> None:
        """Show Markdown on TensorBoard's text page, on rank 0."""
        if self.is_writer:
            self._events.append(events.text(name, markdown))

    def log(self, name: str, step: int, content: "float | bytes") -> bool:
        """Record a number or a PNG of the program; called on all ranks. Return whether it is the first at its step."""
        if self._logged.get(name) == step:
            return False
        self._logged[name] = step
        if not self.is_writer:
            return True
        line: dict[str, Any] = {"step": step, "seconds": self._elapsed_s()}
        if isinstance(content, bytes):
            self._write_line({"event": "image", **line, "name": name})
            self._events.append(events.image(name, content, step))
        else:
            self._write_line({**line, name: content})
            self._events.append(events.scalars({name: content}, step))
        return True

    def add_energy(self, power_w: float) -> None:
        """Add the energy of all GPUs since the last report, at this power; called on all ranks."""
        now_s = time.perf_counter()
        self.result["energy_wh"] = (self.result["energy_wh"] or 0.0) + power_w * (now_s - self._power_at_s) / 3600
        self._power_at_s = now_s

    def record_save(self, held_s: float) -> None:
        """Record for how long a checkpoint has held the training."""
        self._saves_s.append(held_s)
        self.result["checkpoint_hold_s"] = median(self._saves_s)

    def record(self, report: Report) -> None:
        """Record a report: into the result on all ranks, its numbers and events on rank 0."""
        self.result["steps"] = report.step
        for name, count in report.counts().items():
            self.result[name] += count
        self._power_w = report.power_w()
        if self._power_w is not None:
            self.add_energy(self._power_w)
        if report.behind is not None:
            self.result["straggler"] = straggler = asdict(report.behind)
            self.write_text("straggler", f"step {report.step}: {format_behind(straggler)}")
        if self.is_writer:  # it alone has the files
            self._begin_row(report.metrics)
            for event in report.events():
                self._write_line(event)
            numbers = {**report.scalars(), **self._counts()}
            self._write_line({"step": report.step, "seconds": self._elapsed_s(), **numbers})
            self._events.append(events.scalars(numbers, report.step))

    def record_epoch(self, done: EpochDone) -> dict[str, float]:
        """Record an epoch; return its metrics."""
        result, unit = self.result, self.task.unit
        if self._power_w is not None:  # of the evaluation
            self.add_energy(self._power_w)
        self._count += done.samples
        result["train_time_s"] += done.train_s
        self._counted_s += done.train_s
        if self._counted_s > 0:  # else only the test was left
            result[f"train_{unit}_per_s"] = self._count / self._counted_s
        if self.is_best(done.test):
            result[f"best_{self.task.best}"] = done.test[self.task.best]
        result |= {f"eval_{name}": value for name, value in done.test.items()}
        test = {f"eval/{name}": value for name, value in done.test.items()}
        speed = {f"{unit}_per_s": done.samples / done.train_s, "epoch_s": done.train_s}
        metrics = {
            **{f"train/{name}": value for name, value in done.train.items()},
            "train/lr": done.lr,
            **self._counts(),
            **{f"train/{name}": value for name, value in speed.items()},
            **test,
        }
        if self.is_writer:
            line = {"step": result["steps"], "seconds": self._elapsed_s(), "epoch": done.epoch, **metrics}
            self._write_line(line)
            # Per epoch, in separate curves: those of report steps would jump.
            by_epoch = {**done.train, **speed, "time_s": result["train_time_s"]}
            scalars = {f"train_by_epoch/{name}": value for name, value in by_epoch.items()}
            self._events.append(events.scalars({**scalars, **test}, result["steps"]))
        return metrics

    def is_best(self, test: Mapping[str, float]) -> bool:
        """Return whether these metrics of the test split are better than all earlier ones."""
        value, best = test[self.task.best], self.result[f"best_{self.task.best}"]
        if best is None:
            return not math.isnan(value)
        return bool(value > best if self.task.higher_is_better else value < best)

    def conclude(self, reason: str) -> None:
        """Write result.json with this exit reason and close the files, once; later reasons are ignored.

        Returns after that even if another thread has begun: at a signal, the caller ends the process.
        """
        if self._concluding.acquire(timeout=CONCLUDE_S):
            try:
                if self.result["exit_reason"] is None:
                    self._conclude(reason)
            finally:
                self._concluding.release()

    def _conclude(self, reason: str) -> None:
        self.result["exit_reason"] = reason
        self.result["wall_time_s"] = time.perf_counter() - self._started
        if self.is_writer:
            self._begin_row(self._metrics)
            self._events.append(events.hparams_end(finished=reason == exits.FINISHED))
            self._lines.close()
            self._events.close()
            self.result["log_write_failures"] = self.guard.counts[LOG_WRITE]
            self.result["checkpoint_write_failures"] = self.guard.counts[CHECKPOINT_WRITE]
            self._write(self.folder / "result.json", lambda path: write_reserved(path, _nonfinite_as_none(self.result)))
            exits.report(exit_reason=reason)

    def _counts(self) -> dict[str, int]:
        return {f"train/{name}": self.result[name] for name in ("skipped_steps", "loss_spikes")}

    def _elapsed_s(self) -> float:
        return round(time.perf_counter() - self._started, 3)

    def _write_line(self, values: Mapping[str, Any]) -> None:
        self._lines.append((json.dumps(_nonfinite_as_none(values)) + "\n").encode())

    def _write(self, path: Path, write: Callable[[Path], None]) -> None:
        with self.guard(LOG_WRITE, path):
            write(path)


def _nonfinite_as_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Replace NaN and infinity, which JSON does not support, by None."""
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in values.items()
    }
