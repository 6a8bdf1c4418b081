"""hvdlaunch with an Open MPI 5 first on PATH: ranks where they were planned, the first failure, signals."""

import os

import pytest

from tests.mpi import openmpi5
from tests.mpi.launched import PLACE, argv, environment, finished, lines, ranks
from tests.mpi.test_words import BURSTS, all_whole, python

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("openmpi5")
    return f"{openmpi5.installed(folder)}:{environment(folder)['PATH']}"


def test_ranks_are_where_they_were_planned(tmp_path, path):
    done = finished(tmp_path, argv("--bind", "cores", program=PLACE), PATH=path)
    assert (done.returncode, lines(done)) == (0, [])
    found = ranks(tmp_path)
    assert [(one["rank"], one["local_rank"], one["planned_on"]) for one in found] == [
        (0, 0, "localhost"),
        (1, 1, "localhost"),
    ]
    assert [one["blocked"] for one in found] == [["SIGUSR1"]] * 2
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(found[0]["cores"]) & set(found[1]["cores"])


def test_it_is_open_mpi_5_that_runs(tmp_path, path):
    words = argv(program=PLACE)
    planned = finished(tmp_path, [*words[:3], "plan", *words[4:]], PATH=path).stdout
    assert f"{path.partition(':')[0]}/mpirun" in planned
    assert "--prtemca" in planned


@pytest.mark.parametrize(
    ("how", "status", "said"),
    [("3", 3, "ended with status 3"), ("SIGKILL", 137, "died of signal 9 (Killed), perhaps out of memory")],
)
def test_a_failing_rank_is_named_in_one_line(tmp_path, path, how, status, said):
    done = finished(tmp_path, argv(program=[*PLACE, "--end", "1", how]), PATH=path)
    assert done.returncode == status, done.stdout + done.stderr
    assert lines(done) == [f"hvdlaunch: error: rank 1 on localhost {said}"]


def test_all_are_seen_in_whole_lines(tmp_path, path):
    done = finished(tmp_path, argv("--show", "all", program=python(BURSTS)), PATH=path)
    assert (done.returncode, done.stdout) == (0, "")
    all_whole(lines(done), ranks=2)
