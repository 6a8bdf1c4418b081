"""Two hosts under Open MPI 5: ranks where they were planned, a host that dies, a link that goes silent."""

import json
import shlex
import sys
import time

import pytest

from tests.cluster.test_launch import ENV, HVDLAUNCH, NOTE, nothing_left, one_line
from tests.mpi import openmpi5

pytestmark = pytest.mark.slow
RUN = (HVDLAUNCH, "run", "-np", "3", "-H", "h1:2,h2:1", "--silence-s", "4", "--allow-run-as-root", "--")


@pytest.fixture
def env(tmp_path):
    return {**ENV, "PATH": f"{openmpi5.installed(tmp_path)}:{ENV['PATH']}"}


def test_every_rank_is_where_it_was_planned(cluster, tmp_path, env):
    hosts = cluster()
    done = hosts.run("outside", [*RUN, sys.executable, str(NOTE), str(tmp_path)], env=env, cwd=tmp_path, timeout_s=100)
    assert done.returncode == 0, done.stderr
    notes = [json.loads(path.read_text()) for path in sorted(tmp_path.glob("rank-*.json"))]
    assert [(note["host"], note["local_rank"]) for note in notes] == [("h1", 0), ("h1", 1), ("h2", 0)]


@pytest.mark.parametrize("fault", ["kill", "silence"])
def test_a_host_that_is_lost_ends_the_run_and_is_named(cluster, tmp_path, env, fault):
    hosts = cluster()
    program = f"touch {shlex.quote(str(tmp_path))}/$OMPI_COMM_WORLD_RANK; exec sleep 100"
    errors = tmp_path / "errors"
    with errors.open("w") as stderr:
        started = hosts.start("outside", [*RUN, "sh", "-c", program], env=env, cwd=tmp_path, stderr=stderr)
        end = time.monotonic() + 30
        while not all((tmp_path / str(rank)).exists() for rank in range(3)):
            assert time.monotonic() < end, errors.read_text()
            time.sleep(0.05)
        getattr(hosts, fault)("h2")
        began = time.monotonic()
        assert started.wait(60) not in (0, 2)
    assert time.monotonic() - began < 15
    said = errors.read_text().replace("\0", "")  # one of its daemon's own, which no terminal shows
    assert one_line(said) == "hvdlaunch: error: host h2 no longer answers; it had rank 2"
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=15)
