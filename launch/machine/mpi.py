"""Which MPI a host has, as its mpirun tells."""

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
    """The MPI of this mpirun; None where it is missing or does not tell."""
    try:
        answer = ask([mpirun, "--version"], timeout_s=TIMEOUT_S)
    except ProcessError:
        return None
    return parse_mpi(mpirun, answer.out + answer.err)


NAMES = {"Open MPI": "Open MPI", "HYDRA": "MPICH", "Intel": "Intel MPI"}  # by a part of the text


def parse_mpi(path: str, text: str) -> Mpi | None:
    """The MPI from what `mpirun --version` printed; None if that does not tell."""
    name = next((name for sign, name in NAMES.items() if sign in text), None)
    number = re.search(r"(?:Open MPI\)|Version:?)\s*(\d+(?:\.\d+)*)", text)
    if name is None or number is None:
        return None
    return Mpi(path=path, name=name, version=tuple(map(int, number[1].split("."))))
