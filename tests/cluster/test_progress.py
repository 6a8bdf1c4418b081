"""The line of a job over several hosts on a real terminal, and what is printed above it."""

import re

import pytest

from tests.cluster.hosts import PROJECT
from tests.cluster.test_launch import ENV, HVDLAUNCH, nothing_left
from tests.mpi.conftest import wait_until
from tests.terminal import Pty

STANDS = r"hvdlaunch: 2 hosts, 3 ranks up \| step \d+, 2,346 images/s"


@pytest.mark.parametrize("words", [[], ["--show", "all"]], ids=str)
def test_a_terminal_shows_where_the_job_stands_below_what_ranks_print(cluster, tmp_path, words):
    hosts, pty = cluster(hosts=2), Pty(columns=100)
    program = ["python", str(PROJECT / "tests/cluster/programs/reports.py")]
    argv = [HVDLAUNCH, "run", "-H", "h1:2,h2:1", *words, "--", *program]
    env = {**ENV, "TERM": "xterm"}
    job = hosts.start("outside", argv, env=env, cwd=tmp_path, stdout=pty.end, stderr=pty.end)
    wait_until(lambda: re.search(STANDS, pty.text), 40)
    (tmp_path / "enough").touch()
    assert job.wait(20) == 0
    printed = [re.sub(r"^\[[\d,]+\](<stdout>:)?\s?", "", line) for line in pty.settled()]
    steps = [line for line in printed if line.startswith("step ")]
    assert steps == [f"step {20 * number}" for number in range(1, len(steps) + 1)]
    assert len(steps) > 1
    assert [line for line in printed if "images/s" in line or "ranks up" in line] == []
    assert printed[-1] == ""
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=5)
