"""A rank that diverges takes no other with it, and is named."""

import json

import pytest

from tests.mpi.conftest import EFFNET, QUICK, left_in, wait_until
from tests.mpi.interrupted import TINY


@pytest.mark.parametrize("words", [(), ("--sync", "two-level/1", "--compression", "fp16")])
def test_all_ranks_skip_the_step_of_one(runs, words):
    run = runs(2, (*TINY, "--images=512", "--batch-size-per-rank", "64", "--epochs", "1", *words))
    said = run.finish("--check-replicas-every", "1", HVDTRAIN_FAULT="nan@rank1:step2")
    assert "step 2: skipped on all ranks, NaN or Inf in the loss of rank 1" in said
    assert (run.result["steps"], run.result["skipped_steps"], len(run.weights)) == (4, 1, 1)


@pytest.mark.slow
def test_a_loss_of_one_rank_three_times_as_high_is_skipped_and_its_samples_are_named(runs):
    run = runs(2, (*TINY, "--batch-size-per-rank", "64", "--epochs", "2", "--on-spike", "skip", "--lr", "1e-5"))
    said = run.finish(HVDTRAIN_FAULT="spike:3@rank1:step15")
    assert "step 15: skipped on all ranks, the loss spiked on 1 rank\n" in said
    [event] = [line for line in run.lines if line.get("event") == "spike"]
    assert f"loss on rank 1 spiked from about {event['usual']:.4g} to" in said
    assert (event["step"], event["rank"], len(event["samples"])) == (15, 1, 60)
    assert (run.result["skipped_steps"], run.result["loss_spikes"]) == (1, 1)


def test_too_many_skipped_steps_end_the_run_with_status_3(run, tmp_path):
    words = ["--lr", "1e30", "--max-skipped-steps", "3", "--run", "r"]
    done = run("mpirun", 2, [*EFFNET, *QUICK, *words])
    assert done.returncode == 3, done.stdout + done.stderr
    [line] = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert "3 steps in a row" in line
    assert "rank 0" in line
    result = json.loads((tmp_path / "runs" / "effnet" / "r" / "result.json").read_text())
    assert (result["exit_reason"], result["skipped_steps"]) == ("too many skipped steps", 3)
    assert result["memory"]["resident_rank"] in (0, 1)
    wait_until(lambda: not left_in(tmp_path), 5)
