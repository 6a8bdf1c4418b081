"""The line of a job over several hosts on a real terminal, and what is printed above it."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cluster.hosts import PROJECT, Cluster
from tests.cluster.namespaces import Started
from tests.cluster.test_launch import ENV, HVDLAUNCH, LONG, nothing_left
from tests.terminal import Pty

STANDS = r"hvdlaunch: 2 hosts, 3 ranks up \| step \d+ \| 2,346 images/s"


def start(hosts: Cluster, folder: Path, pty: Pty, *words: str) -> Started:
    program = ["python", str(PROJECT / "tests/cluster/programs/reports.py")]
    argv = [HVDLAUNCH, "run", "--allow-run-as-root", "-H", "h1:2,h2:1", *words, "--", *program]
    return hosts.start("outside", argv, env={**ENV, "TERM": "xterm"}, cwd=folder, stdout=pty.end, stderr=pty.end)


def until(pty: Pty, shown: str) -> None:
    end = time.monotonic() + 40
    while not re.search(shown, pty.text):
        assert time.monotonic() < end, pty.text
        time.sleep(0.05)


@pytest.mark.parametrize(
    "words", [[], ["--show", "all"], pytest.param(["--launcher", "horovodrun"], marks=LONG)], ids=str
)
def test_a_terminal_shows_where_the_job_stands_below_what_ranks_print(cluster, tmp_path, words):
    hosts, pty = cluster(hosts=2), Pty(columns=100)
    job = start(hosts, tmp_path, pty, *words)
    until(pty, STANDS)
    (tmp_path / "enough").touch()
    assert job.wait(20) == 0
    printed = [re.sub(r"^\[[\d,]+\](<stdout>:)?\s?", "", line) for line in pty.settled()]
    steps = [line for line in printed if line.startswith("step ")]
    assert steps == [f"step {20 * number}" for number in range(1, len(steps) + 1)]
    assert len(steps) > 1
    assert [line for line in printed if "images/s" in line or "ranks up" in line] == []
    assert printed[-1] == ""
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=5)


def test_the_line_is_cut_to_a_narrow_terminal_and_gone_after_ctrl_c(cluster, tmp_path):
    hosts, pty = cluster(hosts=2), Pty(columns=40)
    job = start(hosts, tmp_path, pty)
    until(pty, r"2 hosts, 3 ranks up \| step \d\x1b")
    job.send_signal(signal.SIGINT)
    assert job.wait(10) == 130
    assert [line for line in pty.settled() if "ranks up" in line] == []


def test_a_restart_counts_its_own_ranks_and_steps(cluster, tmp_path):
    hosts, pty = cluster(hosts=2), Pty(columns=100)
    job = start(hosts, tmp_path, pty, "--restarts", "1")
    until(pty, STANDS)
    rank = next(pid for pid, argv in hosts.processes("h2") if argv[1:2] and argv[1].endswith("reports.py"))
    os.kill(rank, signal.SIGKILL)
    until(pty, r"restart 1 of 1 after: rank 2 on h2")
    until(pty, r"(?s)restart 1 of 1.*3 ranks up\x1b")  # without a step, which the attempt before has reported
    until(pty, f"(?s)restart 1 of 1.*{STANDS}")
    (tmp_path / "enough").touch()
    assert job.wait(20) == 0
