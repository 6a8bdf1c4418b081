"""The MPI of a host, as reported by its mpirun, and the parameters that users have set for Open MPI."""

import contextlib
import os
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePath

from launch.errors import ProcessError
from launch.files import read_text
from launch.process import ask

TIMEOUT_S = 10.0
LINE = re.compile(r"\s*([A-Za-z]\w*)\s*=\s*(.*?)\s*")


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An installed mpirun."""

    path: str  # absolute
    name: str  # Open MPI, MPICH or Intel MPI
    version: tuple[int, ...]  # 4, 1, 8

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


@cache
def read_mpi(mpirun: str) -> Mpi | None:
    """Return the MPI of this mpirun; None if it is missing or not recognised."""
    with contextlib.suppress(ProcessError):
        answer = ask([mpirun, "--version"], timeout_s=TIMEOUT_S)
        return parse_mpi(mpirun, answer.out + answer.err)
    return None


NAMES = {"Open MPI": "Open MPI", "HYDRA": "MPICH", "Intel": "Intel MPI"}  # by a part of the text


def parse_mpi(path: str, text: str) -> Mpi | None:
    """Parse the output of `mpirun --version`; None if it is not recognised."""
    name = next((name for sign, name in NAMES.items() if sign in text), None)
    number = re.search(r"(?:Open MPI\)|Version:?)\s*(\d+(?:\.\d+)*)", text)
    if name is None or number is None:
        return None
    return Mpi(path=path, name=name, version=tuple(map(int, number[1].split("."))))


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter as set by the user."""

    name: str
    value: str
    where: str  # the variable, or the file with its line
    of_prrte: bool  # whether the daemons of Open MPI 5 read it, a project with variables and files of its own
    in_file: bool = False

    def __str__(self) -> str:
        return f"{self.where}: {self.name} = {self.value}" if self.in_file else f"{self.where}={self.value}"


def from_environment(environment: Mapping[str, str]) -> tuple[Parameter, ...]:
    """Return the parameters that variables set, those of PRRTE first."""
    found = [
        Parameter(name=match[2], value=value, where=name, of_prrte=match[1] == "PRTE")
        for name, value in environment.items()
        if (match := re.fullmatch(r"(OMPI|PRTE)_MCA_(\w+)", name))
    ]
    return tuple(sorted(found, key=lambda parameter: (not parameter.of_prrte, parameter.name)))


def from_files(mpirun: str, environment: Mapping[str, str]) -> tuple[Parameter, ...]:
    """Return the parameters that the files of this mpirun set, those that take precedence first.

    A file that cannot be read sets nothing.
    """
    return tuple(
        parameter
        for file, of_prrte in files(PurePath(mpirun).parent, environment.get("HOME", "/"))
        for parameter in _read(file, of_prrte=of_prrte)
    )


@cache
def files(programs: PurePath, home: str) -> tuple[tuple[str, bool], ...]:
    """Return the parameter files of the Open MPI in this folder, as its own programs name them, and whose each is."""
    # A wheel is moved, and only its mpirun finds the new place by itself.
    env = {"OPAL_PREFIX": str(programs.parent), "PRTE_PREFIX": str(programs.parent), **os.environ, "HOME": home}
    said = _said([str(programs / "ompi_info"), "--parsable", "--param", "mca", "base", "--level", "9"], env)
    listed = [
        path
        for name in ("mca_base_override_param_file", "mca_base_param_files")
        for paths in re.findall(f"^mca:mca:base:param:{name}:value:(.*)$", said, re.MULTILINE)
        for path in paths.split(",")
    ]
    said = _said([str(programs / "prte_info"), "--path", "sysconfdir"], env)
    prrte = [
        path
        for folder in re.findall(r"Sysconfdir:\s*(.+)", said)
        for path in (f"{home}/.prte/mca-params.conf", f"{folder}/prte-mca-params.conf")
    ]
    return (*((path, True) for path in prrte), *((path, False) for path in listed))


def first(parameters: Sequence[Parameter], names: Collection[str]) -> Parameter | None:
    """Return the parameter with one of these names that takes precedence; an empty one is not set."""
    return next((each for each in parameters if each.name in names and each.value), None)


def _said(argv: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return the output of a program of Open MPI; empty without it."""
    with contextlib.suppress(ProcessError):
        return ask(argv, timeout_s=TIMEOUT_S, env=environment).out if os.access(argv[0], os.X_OK) else ""
    return ""


def _read(file: str, *, of_prrte: bool) -> Iterator[Parameter]:
    """Yield the parameters of a file; of two lines about one parameter the last counts."""
    try:
        lines = read_text(Path(file)).splitlines()
    except (OSError, ValueError):
        return
    found = {match[1]: (match[2], n) for n, line in enumerate(lines, 1) if (match := LINE.fullmatch(line))}
    for name, (value, n) in found.items():
        yield Parameter(name=name, value=value, where=f"{file}:{n}", of_prrte=of_prrte, in_file=True)
