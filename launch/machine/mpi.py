"""The MPI of a host, as reported by its mpirun."""

import re
from dataclasses import dataclass

from launch.errors import ProcessError
from launch.process import ask

TIMEOUT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An installed mpirun."""

    path: str  # absolute
    name: str  # Open MPI, MPICH or Intel MPI
    version: tuple[int, ...]  # 4, 1, 8

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


def read_mpi(mpirun: str) -> Mpi | None:
    """Return the MPI of this mpirun; None if it is missing or not recognised."""
    try:
        answer = ask([mpirun, "--version"], timeout_s=TIMEOUT_S)
    except ProcessError:
        return None
    return parse_mpi(mpirun, answer.out + answer.err)


NAMES = {"Open MPI": "Open MPI", "HYDRA": "MPICH", "Intel": "Intel MPI"}  # by a part of the text


def parse_mpi(path: str, text: str) -> Mpi | None:
    """Parse the output of `mpirun --version`; None if it is not recognised."""
    name = next((name for sign, name in NAMES.items() if sign in text), None)
    number = re.search(r"(?:Open MPI\)|Version:?)\s*(\d+(?:\.\d+)*)", text)
    if name is None or number is None:
        return None
    return Mpi(path=path, name=name, version=tuple(map(int, number[1].split("."))))
