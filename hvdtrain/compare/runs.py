"""Run folders as they are on disk: complete, unfinished, truncated, of an older version, or not a run's at all."""

import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.files import read_file

FINISHED = "finished"
MISSING = "-"
LARGEST = 10**30  # seconds, bytes and samples of a run are far below this
# Settings that may differ between runs of one average.
_RUN_SETTINGS = {
    "seed",
    "run",
    "runs_dir",
    "experiment",
    "overwrite",
    "host",
    "command",
    "resume",
    "checkpoint_every_s",
    "checkpoint_every_steps",
    "failures_per_gpu_hour",
    "keep",
    "hang_timeout_s",
    "workers",
}
# Suffixes of HOROVOD_ variables that describe where a process was started, not how it computes.
_PROCESS_VARIABLES = (
    "RANK",
    "SIZE",
    "ADDR",
    "PORT",
    "HOSTNAME",
    "HOST",
    "IFACE",
    "TIMELINE",
    "SECRET_KEY",
    "ID",
    "LEVEL",
)


class UnusableFileError(Exception):
    """A file has content that cannot be shown in a table; the message is one line that names the file."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One value of a learning curve; missing fields are None."""

    step: float
    epoch: float | None
    seconds: float | None
    value: float


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run, as its folder describes it."""

    folder: Path
    name: str  # of the folder; with its parents if two runs have equal names
    settings: dict[str, str]  # everything that must be equal within one average, as text; empty if unknown
    derived: frozenset[str]  # names of derived settings
    seed: int | None
    result: dict[str, Any]  # empty if missing
    metrics: tuple[dict[str, Any], ...]  # lines of metrics.jsonl without events
    hosts: tuple[str, ...]
    uses_gpus: bool

    @property
    def exit_reason(self) -> str:
        """Why the run ended; '-' without a result."""
        reason = self.result.get("exit_reason")
        return reason if isinstance(reason, str) and reason else MISSING

    def number(self, name: str) -> float | None:
        """Return a number of the result, with dots for nested names; None if it is missing."""
        value: Any = self.result
        for key in name.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        return _number(value)

    @property
    def unit(self) -> str | None:
        """The unit of the speed, for example images; None without a result."""
        matches = (re.fullmatch(r"train_(\w+)_per_s", name) for name in self.result)
        return next((match[1] for match in matches if match), None)

    @property
    def best(self) -> str | None:
        """The metric that selects the run's best weights; accuracy for a result of an older version that has it."""
        names = (name.removeprefix("best_") for name in self.result if name.startswith("best_"))
        return next(names, "accuracy" if "eval_accuracy" in self.result else None)

    @property
    def metric_names(self) -> list[str]:
        """The metrics of the last test."""
        return [name.removeprefix("eval_") for name in self.result if name.startswith("eval_")]

    def curve(self, name: str) -> list[Point]:
        """A metric over the run, one value for each step; a train/ metric at report steps, if the run has any."""
        lines = [line for line in self.metrics if _number(line.get(name)) is not None]
        if name.startswith("train/"):
            lines = [line for line in lines if "epoch" not in line] or lines
        steps_per_epoch = _number(_float(self.settings.get("steps_per_epoch")))
        points: dict[float, Point] = {}  # by step
        for line in lines:
            step, epoch = _number(line.get("step")), _number(line.get("epoch"))
            if step is not None:
                if epoch is None and steps_per_epoch:
                    epoch = step / steps_per_epoch
                seconds = _number(line.get("seconds"))
                points[step] = Point(step=step, epoch=epoch, seconds=seconds, value=float(line[name]))
        return list(points.values())


def find_folders(folders: Sequence[Path]) -> list[Path]:
    """Return each run folder at or below the folders once, in the order of the folders; BadInput if none is found."""
    runs: dict[Path, Path] = {}  # by resolved path
    for folder in folders:
        if not folder.is_dir():
            raise BadInput(f"{folder}: not a folder. Pass run folders, or folders above them.")
        runs |= {run.resolve(): run for run in _folders_below(folder) if run.resolve() not in runs}
    if not runs:
        raise BadInput(
            f"{', '.join(map(str, folders))}: no run found. Pass folders with a config.json or result.json in or "
            "below them."
        )
    return list(runs.values())


def _folders_below(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        folders.sort()
        if {"result.json", "config.json"} & set(files):
            folders.clear()  # checkpoints are not runs
            yield Path(parent)


def read_runs(folders: Iterable[Path], complaints: list[str]) -> list[Run]:
    """Read the runs of these folders, with unique names; runs that cannot be shown are listed in `complaints`."""
    runs = [run for folder in folders if (run := read_run(folder, complaints)) is not None]
    return _with_unique_names(runs)


def read_run(folder: Path, complaints: list[str]) -> Run | None:
    """Read a run; each missing or unreadable file adds a line to `complaints`, the rest is kept.

    Return None, with one line, for a run that cannot be shown.
    """
    lines: list[str] = []
    try:
        run = _read(folder, lines)
    except UnusableFileError as error:
        complaints.append(f"{error}; skipping this run")
        return None
    complaints += lines
    return run


def _read(folder: Path, complaints: list[str]) -> Run:
    try:
        str(folder.resolve()).encode()
    except UnicodeEncodeError as error:
        shown = os.fsencode(folder).decode(errors="backslashreplace")
        raise UnusableFileError(f"{shown}: its path is not valid UTF-8") from error
    config = _json(folder / "config.json", complaints)
    placement = _json(folder / "placement.json", complaints)
    environment = _json(folder / "environment.json", complaints)
    result = _json(folder / "result.json", complaints)
    if not (folder / "result.json").exists():
        complaints.append(f"{folder}: no result.json, since it is still running or was killed; shown without results")
    if not (folder / "config.json").exists():
        complaints.append(f"{folder}: no config.json, so its settings are unknown; not averaged with other runs")
    ranks = [rank for rank in _list(placement, "ranks", folder / "placement.json") if isinstance(rank, dict)]
    hosts = _list(result, "hosts", folder / "result.json") or dict.fromkeys(str(rank.get("host")) for rank in ranks)
    seed = config.get("seed")
    return Run(
        folder=folder,
        name=folder.resolve().name,
        settings=_settings(config, environment, ranks, np=result.get("np") or len(ranks) or None, hosts=len(hosts)),
        derived=frozenset(_mapping(config.get("derived"))) - frozenset(config),
        seed=seed if isinstance(seed, int) else None,
        result=result,
        metrics=_metrics(folder / "metrics.jsonl", complaints),
        hosts=tuple(sorted(map(str, hosts))),
        uses_gpus=any(str(rank.get("device", "")).startswith("cuda") for rank in ranks),
    )


def _with_unique_names(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with unique names: equal names are extended by the shortest differing ends of their paths."""
    renamed = list(runs)
    paths = [run.folder.resolve().parts for run in runs]
    for length in range(2, max(map(len, paths), default=0) + 1):
        counts = Counter(run.name for run in renamed)
        renamed = [
            replace(run, name="/".join(path[-length:])) if counts[run.name] > 1 else run
            for run, path in zip(renamed, paths, strict=True)
        ]
    return renamed


def _settings(
    config: dict[str, Any], environment: dict[str, Any], ranks: list[dict[str, Any]], *, np: int | None, hosts: int
) -> dict[str, str]:
    """Settings, versions and size as text, by name; empty if the configuration is unknown."""
    if not config:
        return {}
    known = {**config, **_mapping(config.get("derived")), **environment}
    for variables in ("horovod_settings", "nccl_settings"):
        known |= _mapping(environment.get(variables))
    nested = {"derived", "horovod_settings", "nccl_settings"}
    shown = {
        name: format_setting(value)
        for name, value in known.items()
        if name not in _RUN_SETTINGS | nested and not (name.isupper() and name.endswith(_PROCESS_VARIABLES))
    }
    devices = sorted({str(rank.get("device_name") or rank.get("device") or MISSING) for rank in ranks})
    return {"np": format_setting(np), "hosts": str(hosts or MISSING), "device": " ".join(devices) or MISSING, **shown}


def format_setting(value: Any) -> str:
    """Format a setting for the user."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(document: dict[str, Any], name: str, path: Path) -> list[Any]:
    """A list of a document; empty if it is missing."""
    value = document.get(name) or []
    if not isinstance(value, list):
        raise UnusableFileError(f"{path}: {name!r} is not a list")
    return value


def parse_json(path: Path, text: bytes) -> Any:
    """Parse JSON; ValueError for other text, UnusableFileError if it cannot be shown in a table."""

    def integer(digits: str) -> int:
        if abs(float(digits)) > LARGEST:
            raise UnusableFileError(f"{path}: an integer of {len(digits)} digits")
        return int(digits)

    try:
        value = json.loads(text, parse_int=integer)
        json.dumps(value, ensure_ascii=False).encode()
    except RecursionError as error:
        raise UnusableFileError(f"{path}: nested too deeply") from error
    except UnicodeEncodeError as error:
        raise UnusableFileError(f"{path}: half of a surrogate pair, which is not text") from error
    return value


def _json(path: Path, complaints: list[str]) -> dict[str, Any]:
    try:
        document = parse_json(path, read_file(path))
        if not isinstance(document, dict):
            raise TypeError("not an object")
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError) as error:
        complaints.append(f"{path}: cannot be read ({error}); shown without it")
        return {}
    return document


def _metrics(path: Path, complaints: list[str]) -> tuple[dict[str, Any], ...]:
    try:
        lines = read_file(path).splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        complaints.append(f"{path}: cannot be read ({error.strerror}); no learning curve of this run")
        return ()
    records, torn_lines = [], []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(dict(parse_json(path, line)))
        except (ValueError, TypeError):
            torn_lines.append(number)
    if torn_lines:
        first, count = torn_lines[0], len(torn_lines)
        torn_text = f"line {first}" if count == 1 else f"{count} lines, the first is {first}"
        complaints.append(f"{path}: {torn_text} of {len(lines)} truncated or not JSON; the rest is shown")
    return tuple(record for record in records if "event" not in record)


def _float(setting: str | None) -> float | None:
    try:
        return float(setting or "")
    except ValueError:
        return None


def _number(value: Any) -> float | None:
    """Return the number; None for anything else, including NaN and infinity."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return float(value) if is_number else None
