"""A rank that diverges takes no other with it, and is named."""

import json

import pytest

from tests.mpi.conftest import EFFNET, QUICK, left_in, wait_until


def test_all_ranks_skip_the_step_of_one(run_program):
    answers = run_program("mpirun", 2, "skipped_steps.py", "fp16", "loss", "1", "flat")
    for answer in answers:
        assert answer["skipped"] == [None, None, None, [1, "loss"], None, None, None]
        assert answer["unchanged"] == [number == 3 for number in range(7)]  # batch norm's statistics too
        assert all(answer["finite"])
        assert answer["scale"] == 64.0
        assert answer["weights"] == answers[0]["weights"]


@pytest.mark.parametrize(("how", "culprit", "ranks"), [("powersgd", 1, 2), ("local", 3, 4)])
def test_a_rank_of_any_group_is_named_by_its_gradients(run_program, how, culprit, ranks):
    """What the other ranks' last pass gives is finite, and so is what they computed themselves."""
    answers = run_program("mpirun", ranks, "skipped_steps.py", "fp32", "gradients", str(culprit), how)
    apart = [how == "local" and rank // 2 != culprit // 2 for rank in range(ranks)]
    for answer, goes_on in zip(answers, apart, strict=True):
        assert answer["skipped"][3] == (None if goes_on else [culprit, "gradients"])
        assert answer["skipped"].count(None) == (7 if goes_on else 6)
        assert answer["unchanged"] == [number == 3 and not goes_on for number in range(7)]
        assert all(answer["finite"])
    weights = {goes_on: answer["weights"] for goes_on, answer in zip(apart, answers, strict=True)}
    assert [answer["weights"] for answer in answers] == [weights[goes_on] for goes_on in apart]


def test_a_sum_too_large_for_fp16_skips_the_step_of_all_groups_and_halves_their_scale(run_program):
    answers = run_program("mpirun", 4, "skipped_steps.py", "fp32", "overflow", "1", "fp16")
    for answer in answers:
        assert answer["skipped"] == [None, None, None, [None, "summed gradients"], None, None, None]
        assert answer["unchanged"] == [number == 3 for number in range(7)]
        assert answer["wire"] == {"scale": 2, "calm_steps": 3}
        assert answer["weights"] == answers[0]["weights"]


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
