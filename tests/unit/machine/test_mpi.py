import pytest

from launch.machine.mpi import Mpi, parse_mpi


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        ("mpirun (Open MPI) 4.1.8\n\nReport bugs to http://www.open-mpi.org/community/help/\n", "Open MPI", (4, 1, 8)),
        (
            "HYDRA build details:\n    Version:                                 4.2.1\n    CC: gcc 12.2\n",
            "MPICH",
            (4, 2, 1),
        ),
        ("Intel(R) MPI Library for Linux* OS, Version 2021.9 Build 20230307\nCopyright\n", "Intel MPI", (2021, 9)),
    ],
)
def test_an_mpi_says_what_it_is(text, name, version):
    assert parse_mpi("/bin/mpirun", text) == Mpi(path="/bin/mpirun", name=name, version=version)


@pytest.mark.parametrize("text", ["", "mpirun: command not found", "Version: 7", "mpirun (Open MPI)"])
def test_what_is_no_mpi_is_none(text):
    assert parse_mpi("/bin/mpirun", text) is None
