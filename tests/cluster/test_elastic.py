"""Ranks over two hosts, of which all of one are lost; under Open MPI 5, skipped with any other."""

import contextlib
import json
import os
import signal

import pytest

from tests.cluster.test_launch import ENV, HVDLAUNCH, nothing_left
from tests.mpi import openmpi5
from tests.mpi.conftest import wait_until

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not openmpi5.is_here(), reason="the MPI here is not Open MPI 5: make test-elastic sets that up"),
]
RUN = ("run", "-np", "4", "-H", "h1:2,h2:2", "--elastic", "--min-np", "2", "--restarts", "2", "--silence-s", "4")
TRAIN = ("python", "-m", "hvdtrain.effnet", "--data", "digits", "--model", "efficientnet_tiny", "--run", "r")
WORDS = ("--batch-size-per-rank", "32", "--epochs", "3", "--report-every-steps", "1", "--checkpoint-every", "2steps")


@pytest.fixture
def started(cluster, tmp_path):
    """Two hosts, a run on both that has taken some steps, and where it tells what it does."""
    hosts, errors, metrics = cluster(), tmp_path / "errors", tmp_path / "runs/effnet/r/metrics.jsonl"
    with errors.open("w") as out:
        argv = [HVDLAUNCH, *RUN, "--", *TRAIN, *WORDS]
        job = hosts.start("outside", argv, env=ENV, cwd=tmp_path, stdout=out, stderr=out)
    wait_until(lambda: metrics.exists() and metrics.read_text().count('"step"') >= 5, 150, errors)
    return hosts, job, errors


def finished(job, errors, tmp_path):
    assert job.wait(200) == 0, errors.read_text()
    return json.loads((tmp_path / "runs/effnet/r/result.json").read_text())


def test_all_ranks_of_a_host_die_and_the_others_go_on(started, tmp_path):
    hosts, job, errors = started
    for process in hosts.processes("h2"):
        if "hvdtrain.effnet" in process.argv:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
    result = finished(job, errors, tmp_path)
    assert (result["exit_reason"], result["lost_ranks"], result["resumed"]) == ("finished", 2, 0)
    assert "ranks 2, 3 on h2 lost; 2 ranks continue after" in errors.read_text() or result["recoveries"] == 2
    nothing_left(hosts, ("h1", "h2", "outside"), within_s=15)


def test_a_whole_host_is_lost_and_the_run_starts_again_on_the_other(started, tmp_path):
    """Open MPI 5.0.11 ends a run whose daemon on a host is lost, recoverable or not."""
    hosts, job, errors = started
    hosts.kill("h2")
    result = finished(job, errors, tmp_path)
    assert (result["exit_reason"], result["np"], result["hosts"], result["resumed"]) == ("finished", 2, ["h1"], 1)
    assert "restart 1 of 2 after: host h2 no longer answers; it had ranks 2, 3" in errors.read_text()
    nothing_left(hosts, ("h1", "outside"), within_s=15)
