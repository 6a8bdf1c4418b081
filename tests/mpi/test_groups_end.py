"""Groups of ranks that meet in rounds: stalls, bits that flip, a group that is late, BERT."""

import os
import signal
import sys
import time

import psutil
import pytest

from tests import texts
from tests.mpi.conftest import EFFNET, TIMEOUT_S, rank_pids, wait_until
from tests.mpi.interrupted import TINY, Runs, ended, same_end, stopping
from tests.mpi.launched import argv, finished, lines
from tests.mpi.test_bert import INTERRUPTED

ROUNDS = ("--sync", "local", "--sync-every", "5", "--sync-group-size")
TRAIN = (*TINY, "--batch-size-per-rank", "32", "--epochs", "1", "--report-every-steps", "3", *ROUNDS)


@pytest.mark.slow
def test_a_rank_that_stalls_inside_its_group_is_named_and_the_run_ends(tmp_path):
    program = [sys.executable, *EFFNET, *TRAIN, "2", "--run", "r", "--hang-timeout-s", "8"]
    done = finished(tmp_path, argv("-np", "4", program=program), HVDTRAIN_FAULT="stop@rank2:step7")
    assert done.returncode != 0
    said = "did not arrive at step 7 (it hangs, was stopped, or its host is silent)"
    assert f"hvdlaunch: error: rank 2 on localhost {said}" in lines(done)


@pytest.mark.slow
def test_a_bit_that_flips_inside_a_group_ends_the_run_where_all_meet(runs):
    run = runs(4, (*TRAIN, "2"))
    said = run.finish("--check-replicas-every", "2", status=4, HVDTRAIN_FAULT="bitflip@rank3:step4")
    assert "replicas differ after step 4: rank 3 from the others" in said
    assert (run.result["exit_reason"], run.result["steps"]) == ("replicas differ", 5)


@pytest.mark.slow
def test_a_group_that_is_late_is_named_with_its_lag(runs):
    run = runs(2, (*TRAIN, "1"))
    with stopping(run.start(HVDTRAIN_FAULT="stop@rank1:step9"), run.folder) as job:

        def stopped():
            pids = rank_pids(run.path)
            return len(pids) == 2 and psutil.Process(pids[1]).status() == "stopped" and pids[1]

        pid = wait_until(stopped, TIMEOUT_S)
        time.sleep(4)
        os.kill(pid, signal.SIGCONT)
        said = ended(job, 0)
    (late,) = [line for line in run.lines if line.get("event") == "behind" and line["lag_s"] > 3]
    assert (late["step"], late["rank"]) == (9, 1)
    assert f"hvdtrain: warning: step 9: straggler: host {late['host']} " in said
    assert f" wait {late['lag_s']:.1f} s" in said


@pytest.mark.slow
def test_a_bert_in_groups_that_was_killed_in_a_round_ends_as_if_it_had_not_been(tmp_path, tmp_path_factory):
    words = (*INTERRUPTED, "--task", "mlm", "--max-steps", "9", "--sync", "local", "--sync-every", "2")
    words = (*words, "--sync-group-size", "1")
    folders = (tmp_path_factory.mktemp("whole"), tmp_path)
    whole, broken = (Runs(folder=folder, ranks=2, words=words, script="bert") for folder in folders)
    for run in (whole, broken):
        texts.put(run.folder / "texts")
    whole.finish()
    broken.killed("step4", saved=2)
    broken.finish()
    same_end(broken, whole)
    assert broken.result["resumed"] == 1
