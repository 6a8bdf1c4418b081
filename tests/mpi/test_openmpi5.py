"""hvdlaunch with an Open MPI 5 first on PATH: ranks where they were planned, the first failure, signals."""

import os

import pytest

from tests.mpi import openmpi5
from tests.mpi.launched import PLACE, argv, dry_run, environment, finished, lines, ranks
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
    assert [one["blocked"] for one in found] == [[]] * 2
    if len(os.sched_getaffinity(0)) > 1:
        assert not set(found[0]["cores"]) & set(found[1]["cores"])
    planned = dry_run(tmp_path, argv(program=PLACE), PATH=path)[1]
    assert planned[0] == f"{path.partition(':')[0]}/mpirun"


def test_a_failing_rank_is_named_in_one_line(tmp_path, path):
    done = finished(tmp_path, argv(program=[*PLACE, "--end", "1", "SIGKILL"]), PATH=path)
    assert done.returncode == 137, done.stdout + done.stderr
    said = "died of signal 9 (Killed), perhaps out of memory"
    assert lines(done) == [f"hvdlaunch: error: rank 1 on localhost {said}"]


def test_all_are_seen_in_whole_lines(tmp_path, path):
    done = finished(tmp_path, argv("--show", "all", program=python(BURSTS)), PATH=path)
    assert done.returncode == 0, done.stderr
    all_whole(lines(done), ranks=2)
