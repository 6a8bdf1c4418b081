"""A model of one's own: examples/own_model.py as it stands, and programs that do what a newcomer may try."""

import json
from pathlib import Path

import pytest

from tests.mpi.conftest import PROGRAMS, PROJECT, end_well, left_in, program_of, start_in, wait_until
from tests.mpi.interrupted import refusal
from tests.refusals import require_facts

EXAMPLE = str(PROJECT / "examples/own_model.py")
OWN = str(PROGRAMS / "own.py")
SHORT = ("--run", "r", "--epochs", "2", "--batch-size-per-rank", "128", "--deterministic")
SMALL = ("--run", "r", "--epochs", "2", "--batch-size-per-rank", "32", "--deterministic")


def weights(folder: Path, ranks: int, experiment: str = "own_model") -> str:
    """The hash of all ranks' weights at the end."""
    files = [folder / f"runs/{experiment}/r/ranks/rank-{rank}.json" for rank in range(ranks)]
    (sha256,) = {json.loads(file.read_text())["weights_sha256"] for file in files}
    return sha256


def result(folder: Path, experiment: str = "own_model") -> dict:
    return json.loads((folder / f"runs/{experiment}/r/result.json").read_text())


@pytest.mark.slow
@pytest.mark.long  # a minute of a core; other examples learn in make test
def test_the_example_learns_digits(tmp_path):
    end_well(tmp_path, "python", 1, [EXAMPLE, "--run", "r", "--epochs", "6"])
    assert result(tmp_path)["eval_accuracy"] > 0.85
    assert result(tmp_path)["exit_reason"] == "finished"


def test_the_example_takes_an_option_of_its_own_and_its_model_can_be_cut(tmp_path):
    words = ("--width", "32", "--stages", "2", "--accumulate-steps", "2", "--epochs", "1")
    end_well(tmp_path, "mpirun", 2, [EXAMPLE, *SHORT, *words])
    assert result(tmp_path)["exit_reason"] == "finished"
    assert result(tmp_path)["eval_loss"] < 2.3  # below that of a guess


# --- what the body of the loop may do


def test_a_break_on_one_rank_ends_all_with_one_line(tmp_path):
    done = start_in(tmp_path, "mpirun", 2, [OWN, "break_on_rank_1", *SMALL])
    assert done.returncode == 1, done.stdout + done.stderr
    require_facts(refusal(done.stderr), "hvdtrain: error: the loop over the training was left on rank 1")
    assert result(tmp_path, "own")["exit_reason"] == "left by some ranks"
    assert not left_in(tmp_path)


@pytest.mark.parametrize(
    ("variant", "line", "reason"),
    [
        ("break_at_step_2", "saved at step 3", "preempted"),
        pytest.param("stop_on_rank_1", "finishing after step 2", "finished", marks=pytest.mark.slow),
    ],
)
def test_a_loop_that_is_left_in_the_middle_of_a_round_ends_with_it(tmp_path, variant, line, reason):
    words = [OWN, variant, *SMALL, "--sync", "local:3/1", "--report-every-steps", "2"]
    assert line in end_well(tmp_path, "mpirun", 2, words)
    facts = result(tmp_path, "own")
    assert (facts["exit_reason"], facts["steps"]) == (reason, 3)
    if reason == "preempted":
        end_well(tmp_path, "mpirun", 2, words)
    weights(tmp_path, 2, "own")  # equal


@pytest.mark.parametrize(
    ("variant", "line"),
    [
        ("odd_on_rank_1", "hvdtrain: error: rank 1 on ... it has met something odd"),
        pytest.param("odd", "hvdtrain: error: all have met something odd", marks=pytest.mark.slow),
    ],
)
def test_bad_input_in_the_loop_ends_the_job_with_one_line(tmp_path, variant, line):
    done = start_in(tmp_path, "mpirun", 2, [OWN, variant, *SMALL])
    assert done.returncode == 2, done.stdout + done.stderr
    require_facts(refusal(done.stderr), line)
    assert not left_in(tmp_path)


def test_a_stop_on_one_rank_finishes_all(tmp_path):
    said = end_well(tmp_path, "mpirun", 2, [OWN, "stop_on_rank_1", *SMALL, "--report-every-steps", "1"])
    assert "finishing after step 2: rank 1 has seen enough" in said
    facts = result(tmp_path, "own")
    assert (facts["exit_reason"], facts["steps"], facts["epochs"]) == ("finished", 2, 1)
    assert facts["stopped"] == "rank 1 has seen enough"
    weights(tmp_path, 2, "own")  # equal


# --- data


@pytest.mark.slow
def test_a_dataset_that_workers_read_trains_like_its_tensors(tmp_path):
    folders = [tmp_path / variant for variant in ("tensors", "dataset")]
    for folder in folders:
        folder.mkdir()
        end_well(folder, "mpirun", 2, [OWN, folder.name, *SMALL])
    wait_until(lambda: not left_in(folders[1]), 5)
    assert weights(folders[0], 2, "own") == weights(folders[1], 2, "own")
    results = [result(folder, "own") for folder in folders]
    tests = [[facts[name] for name in ("eval_loss", "eval_far/loss")] for facts in results]
    assert tests[0] == pytest.approx(tests[1])
    assert tests[0][0] != tests[0][1]
    assert json.loads((folders[1] / "runs/own/r/config.json").read_text())["workers"]


@pytest.mark.slow
def test_a_program_that_its_workers_would_start_again_fails_at_once(tmp_path):
    text = (PROGRAMS / "own.py").read_text().replace('if __name__ == "__main__":', "if True:")
    unguarded = program_of(tmp_path, text.replace("variant = ", 'variant = "dataset"  # '))
    done = start_in(tmp_path, "python", 1, [unguarded, *SMALL])
    assert done.returncode == 1
    assert 'put hvdtrain.start below `if __name__ == "__main__":`, since workers import this file' in done.stderr


def test_samples_that_are_others_on_another_rank_are_refused_before_there_is_a_run(tmp_path):
    done = start_in(tmp_path, "mpirun", 2, [OWN, "shards", *SMALL])
    assert done.returncode == 2
    require_facts(refusal(done.stderr), "rank 1 has other training samples than rank 0 ... the same samples")
    assert not (tmp_path / "runs").exists()


# --- slots


def test_a_program_fills_slots_that_hvdtrain_does_not_know(run_program, tmp_path):
    answers = run_program("mpirun", 2, "own_slots.py", "--run", "r")
    even = [2, 4, 6, 8]
    assert answers == [{"synced": even, "begun": 8, "ended": 8, "values": 8}] * 2
    folders = (tmp_path / "runs/own_slots/r/checkpoints").glob("step-*")
    assert sorted(int(path.name.removeprefix("step-")) for path in folders) == even
