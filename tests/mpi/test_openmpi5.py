"""hvdlaunch with an Open MPI 5 first on PATH: the first failure, and what ranks print."""

import pytest

from tests.mpi import openmpi5
from tests.mpi.launched import PLACE, argv, environment, finished, lines
from tests.mpi.test_words import BURSTS, all_whole, python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openmpi5")
    return f"{openmpi5.installed(folder)}:{environment(folder)['PATH']}"


def test_a_failing_rank_is_named_in_one_line(tmp_path, path):
    done = finished(tmp_path, argv(program=[*PLACE, "--end", "1", "SIGKILL"]), PATH=path)
    assert done.returncode == 137, done.stdout + done.stderr
    said = "died of signal 9 (Killed), perhaps out of memory"
    assert lines(done) == [f"hvdlaunch: error: rank 1 on localhost {said}"]


def test_all_are_seen_in_whole_lines(tmp_path, path):
    done = finished(tmp_path, argv("--show", "all", program=python(BURSTS)), PATH=path)
    assert done.returncode == 0, done.stderr
    all_whole(lines(done), ranks=2)
