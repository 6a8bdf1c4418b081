"""Two hosts under Open MPI 5: ranks where they were planned, a link that goes silent."""

import sys
import time

import pytest

from tests.cluster.test_launch import ENV, NOTE, hvdlaunch, notes, nothing_left, one_line, start_sleepers
from tests.mpi import openmpi5

pytestmark = pytest.mark.slow


@pytest.fixture
def env(tmp_path):
    return {**ENV, "PATH": f"{openmpi5.installed(tmp_path)}:{ENV['PATH']}"}


def test_a_host_that_is_lost_ends_the_run_and_is_named(cluster, tmp_path, env):
    hosts = cluster()
    started, errors = start_sleepers(hosts, tmp_path, "--silence-s", "4", env=env)
    hosts.silence("h2")
    began = time.monotonic()
    assert started.wait(60) not in (0, 2)
    assert time.monotonic() - began < 15
    said = errors.read_text().replace("\0", "")  # one of its daemon's own, which no terminal shows
    assert one_line(said) == "hvdlaunch: error: host h2 no longer answers; it had rank 2"
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=15)


def test_every_rank_is_where_it_was_planned(cluster, tmp_path, env):
    done, _ = hvdlaunch(cluster(), "outside", tmp_path, "h1:2,h2:1", "--", sys.executable, NOTE, tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    places = [(note["host"], note["local_rank"]) for note in notes(tmp_path)]
    assert places == [("h1", 0), ("h1", 1), ("h2", 0)]
