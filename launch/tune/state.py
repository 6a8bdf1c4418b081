"""The measurements of a walk, in a file that is complete after every start, so that the same command resumes it."""

import json
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch.documents import Document, parse
from launch.errors import CommandError, LaunchError
from launch.files import read_text, write_whole
from launch.start.request import RunRequest
from launch.tune.remedies import Catalogue
from launch.tune.walk import Configuration, Start, Wanted
from launch.tune.windows import LEAST, MOST, RATES, shares_of

Key = tuple[tuple[str, ...], bool]


def settings(request: RunRequest, catalogue: Catalogue) -> dict[str, Any]:
    """Return everything that must be equal for all starts of a walk."""
    return {
        "program": list(request.program),
        "np": request.np,
        "hosts": [f"{host.name}:{host.slots}" for host in request.hosts or ()],
        "gpus": request.gpus if isinstance(request.gpus, str) else list(request.gpus),
        "bind": request.binding,
        "launcher": request.launcher,
        "apptainer": request.apptainer,
        "network": request.network,
        "measure": list(catalogue.measure),
        "remedies": json.loads(json.dumps([asdict(remedy) for remedy in catalogue.remedies])),
    }


class State:
    """The starts so far, by configuration."""

    def __init__(self, file: Path, of: Mapping[str, Any]) -> None:
        """Load the file; CommandError if it is invalid or from another walk."""
        self.file, self._settings = file, of
        self._lines: list[dict[str, Any]] = []
        self._kept: defaultdict[Key, deque[Start]] = defaultdict(deque)
        for line, key, start in self._read():
            self._kept[key].append(start)
            self._lines.append(line)

    def _read(self) -> list[tuple[dict[str, Any], Key, Start]]:
        try:
            known = Document(parse(read_text(self.file)))
            was = known.within("settings").values
            differing = [name for name, value in self._settings.items() if was.get(name) != value]
            lines = enumerate(known.list("starts"))
            read = [(line, *_recorded(Document(line, f"starts[{number}]"))) for number, line in lines]
        except FileNotFoundError:
            return []
        except (OSError, ValueError) as error:
            raise CommandError(
                f"{self.file} cannot be continued ({error}): choose another --name, or move it away"
            ) from error
        if differing:
            raise CommandError(f"{self.file} is of another {differing[0]}: choose another --name, or move it away")
        return read

    def __len__(self) -> int:
        return len(self._lines)

    def take(self, wanted: Wanted) -> Start | None:
        """Return the next recorded start of this kind, once each; a failed baseline is not returned, but repeated."""
        kept = self._kept[_key(wanted)]
        while kept:
            start = kept.popleft()
            if start.problem is None or wanted.configuration:
                return start
        return None

    def ended_well(self, *, besides: Iterable[Configuration]) -> list[int]:
        """The numbers of the starts that did, from 1, without the newest of some configurations."""
        well = [number for number, line in enumerate(self._lines, start=1) if line.get("problem") is None]
        newest = {tuple(self._lines[number - 1]["remedies"]): number for number in well}
        kept = {newest.get(_names(configuration)) for configuration in besides}
        return [number for number in well if number not in kept]

    def add(self, wanted: Wanted, start: Start) -> None:
        """Add a measured start; LaunchError if the file cannot be written."""
        names, profile = _key(wanted)
        self._lines.append({"remedies": list(names), "profile": profile, **asdict(start)})
        self.write()

    def write(self) -> None:
        """Write the file."""
        text = json.dumps({"tune": 1, "settings": self._settings, "starts": self._lines}, indent=1)
        try:
            self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.file, f"{text}\n")
        except OSError as error:
            raise LaunchError(f"{self.file} cannot be written: {error.strerror}") from error


def _recorded(line: Document) -> tuple[Key, Start]:
    start = Start(
        rates=line.numbers("rates", *RATES),
        seconds=line.number("seconds", 0, MOST),
        problem=line.optional_text("problem"),
        shares=shares_of(line),
        epoch_samples=line.optional_number("epoch_samples", LEAST, MOST),
    )
    return (tuple(map(str, line.list("remedies"))), line.values.get("profile") is True), start


def _key(wanted: Wanted) -> Key:
    return _names(wanted.configuration), wanted.profile


def _names(configuration: Configuration) -> tuple[str, ...]:
    return tuple(remedy.name for remedy in configuration)
