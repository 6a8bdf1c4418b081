"""Run folders as they are on disk: complete, unfinished, truncated, of an older version, or not a run's at all."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hvdtrain.insight.compare.texts import MISSING, escape_line
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.files import read_file

FINISHED = "finished"
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
    "resume_from",
    "checkpoint_every",
    "failures_per_gpu_hour",
    "keep",
    "hang_timeout_s",
    "workers",
    "export",
}
_NESTED = ("derived", "horovod_settings", "nccl_settings")
# HOROVOD_ variables that describe where a process was started, not how it computes.
_OF_PROCESS = re.compile(r"HOROVOD_\w*(RANK|SIZE|ADDR|PORT|HOSTNAME|HOST|IFACE|TIMELINE|SECRET_KEY|ID|LEVEL)")


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """One run, as its folder describes it."""

    name: str  # of the folder; with its parents if two runs have equal names
    settings: dict[str, str]  # everything that must be equal within one average, as text; empty if unknown
    derived: frozenset[str]  # names of derived settings
    seed: int | None
    result: dict[str, Any]  # empty if missing
    metrics: tuple[dict[str, Any], ...]  # lines of metrics.jsonl that end an epoch
    hosts: tuple[str, ...]
    uses_gpus: bool

    @property
    def exit_reason(self) -> str:
        """Why the run ended; '-' without a result."""
        return str(self.result.get("exit_reason") or MISSING)

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

    def curve(self, name: str) -> list[tuple[float | None, float | None, float]]:
        """A metric after each epoch: the epoch, seconds since the start, and the value."""
        return [
            (_number(line["epoch"]), _number(line.get("seconds")), value)
            for line in self.metrics
            if (value := _number(line.get(name))) is not None
        ]


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


def read_runs(folders: Iterable[Path], complaints: list[str]) -> list[RecordedRun]:
    """Read the runs of these folders, with unique names; runs that cannot be read are listed in `complaints`."""
    runs = {folder.resolve(): run for folder in folders if (run := read_run(folder, complaints)) is not None}
    if len({run.name for run in runs.values()}) == len(runs):
        return list(runs.values())
    above = os.path.commonpath(runs)
    return [replace(run, name=escape_line(os.path.relpath(folder, above))) for folder, run in runs.items()]


def read_run(folder: Path, complaints: list[str]) -> RecordedRun | None:
    """Read a run; None if it cannot be read. `complaints` gets a line for that, or for each file that is missing."""
    lines: list[str] = []
    try:
        run = _read(folder, lines)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        complaints.append(f"{folder}: cannot be read ({error}); skipping this run")
        return None
    complaints += lines
    return run


def _read(folder: Path, complaints: list[str]) -> RecordedRun:
    names = ("config", "placement", "environment", "result")
    config, placement, environment, result = (_read_document(folder / f"{name}.json") for name in names)
    if not result:
        complaints.append(f"{folder}: no result.json, since it is still running or was killed; shown without results")
    if not config:
        complaints.append(f"{folder}: no config.json, so its settings are unknown; not averaged with other runs")
    ranks = placement.get("ranks", [])
    hosts = result.get("hosts") or {rank.get("host") for rank in ranks}
    seed = config.get("seed")
    return RecordedRun(
        name=escape_line(folder.resolve().name),
        settings=_settings(config, environment, ranks, np=result.get("np") or len(ranks) or None, hosts=len(hosts)),
        derived=frozenset({"threads", *config.get("derived", {})}) - frozenset(config),
        seed=seed if isinstance(seed, int) else None,
        result=result,
        metrics=_read_metrics(folder / "metrics.jsonl", complaints),
        hosts=tuple(sorted(map(str, hosts))),
        uses_gpus=any(str(rank.get("device")).startswith("cuda") for rank in ranks),
    )


def _settings(
    config: dict[str, Any], environment: dict[str, Any], ranks: list[dict[str, Any]], *, np: int | None, hosts: int
) -> dict[str, str]:
    """Settings, versions and size as text, by name; empty if the configuration is unknown."""
    if not config:
        return {}
    known = {**config, **config.get("derived", {}), **environment}
    for variables in _NESTED[1:]:
        known |= environment.get(variables, {})
    shown = {
        name: format_setting(value)
        for name, value in known.items()
        if name not in (*_RUN_SETTINGS, *_NESTED) and not _OF_PROCESS.fullmatch(name)
    }
    devices = sorted({str(rank.get("device_name") or rank.get("device") or MISSING) for rank in ranks})
    threads = sorted({str(rank.get("threads", MISSING)) for rank in ranks})
    return {
        "np": format_setting(np),
        "hosts": str(hosts or MISSING),
        "device": " ".join(devices) or MISSING,
        "threads": " ".join(threads) or MISSING,
        **shown,
    }


def format_setting(value: Any) -> str:
    """Format a setting for the user."""
    if value is None:
        return "not set"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return value if isinstance(value, str) else json.dumps(value)


def read_json(path: Path) -> Any:
    """Return what a JSON file has; OSError, or ValueError if it is not JSON."""
    try:
        return json.loads(read_file(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {error}") from error


def _escape_all(value: Any) -> Any:
    if isinstance(value, str):
        return escape_line(value)
    if isinstance(value, list):
        return [_escape_all(part) for part in value]
    return {escape_line(name): _escape_all(part) for name, part in value.items()} if isinstance(value, dict) else value


def _read_document(path: Path) -> dict[str, Any]:
    """Return an object of JSON, its texts escaped for a table; empty if the file is missing."""
    try:
        document = read_json(path)
    except FileNotFoundError:
        return {}
    if not isinstance(document, dict):
        raise TypeError(f"{path.name}: not an object")
    return {escape_line(name): _escape_all(value) for name, value in document.items()}


def _read_metrics(path: Path, complaints: list[str]) -> tuple[dict[str, Any], ...]:
    try:
        lines = read_file(path).splitlines()
    except FileNotFoundError:
        return ()
    except OSError as error:
        complaints.append(f"{path}: {error.strerror or error}; its curve is left out")
        return ()
    records, torn = [], 0
    for line in lines:
        try:
            records.append(json.loads(line))
        except (ValueError, RecursionError):
            torn += 1
    if torn:
        complaints.append(f"{path}: {torn} of {len(lines)} lines truncated or not JSON; the rest is shown")
    return tuple(record for record in records if isinstance(record, dict) and "epoch" in record)


def _number(value: Any) -> float | None:
    """Return the number; None for anything else, including NaN and infinity."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
    return float(value) if is_number else None
