"""A run that was interrupted ends as if it had not been: the same bits, and each step once in its logs."""

import json

import pytest

from tests.mpi.conftest import PROGRAMS, folder_of_images, long, program_of
from tests.mpi.interrupted import EVERY_STEP, SHORT, TINY, Runs, files_under, refusal, same_end
from tests.refusals import require_facts

BY_HOROVOD = (*SHORT, "--reducer", "horovod")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of 2 ranks that was killed after step 4, with checkpoints of steps 3 and 4."""
    run = Runs(folder=tmp_path_factory.mktemp("half"), ranks=2, words=BY_HOROVOD)
    run.killed("step5", saved=4)
    return run


# --- the same number of ranks


def interrupted(run, place, saved):
    """Killed at this place, then run to its end."""
    run.killed(place, saved=saved)
    assert f"resumed from runs/effnet/r/checkpoints/step-{saved:09d}, epoch " in run.finish()


def test_from_the_middle_and_from_the_end_of_an_epoch(half, tmp_path, reference):
    run = half.copied(tmp_path)
    interrupted(run, "eval1", 6)
    same_end(run, reference(2, BY_HOROVOD))
    assert run.result["resumed"] == 2


def test_another_split_of_the_same_global_batch_has_the_same_steps_and_rates(half, tmp_path, reference):
    """Two ranks with 64 images each, then one that takes 64 twice."""
    words = (*BY_HOROVOD, "--accumulate-steps", "2")
    run, whole = half.copied(tmp_path, ranks=1, words=words), reference(2, BY_HOROVOD)
    run.finish()
    rates = [[(line["step"], line["train/lr"]) for line in one.lines if "train/lr" in line] for one in (run, whole)]
    assert (run.result["steps"], len(rates[0])) == (whole.result["steps"], 14)  # a line for each step and each epoch
    assert rates[0] == rates[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        long(2, ("--precision=bf16", "--compression=fp16", "--optimizer=rmsprop", "--ema-epochs=0", "--dropout=0.3")),
        (3, ("--optimizer=lars", "--deterministic", "--sync-bn", "--accumulate-steps", "2", "--augment", "cutout:6")),
        long(2, ("--compression=powersgd:2", "--check-replicas-every", "2")),  # test_mesh goes on with fewer ranks
    ],
    ids=["bf16", "three ranks", "powersgd"],
)
def test_other_ways_to_train(runs, reference, ranks, words):
    words = (*SHORT, *words, "--batch-size-per-rank", "32", "--epochs", "1")
    run = runs(ranks, words)
    interrupted(run, "step3", 2)
    same_end(run, reference(ranks, words))


@pytest.mark.slow
@pytest.mark.long  # three starts of workers; in make test-slow one that was killed is survived
@pytest.mark.timeout(900)
def test_image_folders_with_loader_workers(runs, reference, tmp_path):
    folder_of_images(tmp_path / "images", 40)
    words = ("--data", "imagefolder", "--data-dir", str(tmp_path / "images"), "--model", "efficientnet_tiny")
    words = (*words, "--workers", "1", "--batch-size-per-rank", "16", "--epochs", "1", "--dropout", "0.5", *EVERY_STEP)
    run = runs(1, words)
    interrupted(run, "step3", 2)
    same_end(run, reference(1, words))


FITTING = f"""
import os, runpy, sys
from hvdtrain.program import training
training.most_that_fit = lambda *_: int(os.environ["MOST"])
sys.argv.insert(1, "effnet")
runpy.run_path({str(PROGRAMS / "every_option.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
def test_the_micro_batch_that_was_found_is_kept(runs, tmp_path):
    """As many samples at a time as fitted when the run began; a resumed run does not try again."""
    words = (*TINY, "--batch-size-per-rank", "auto", "--global-batch-size", "480", "--epochs", "1", *EVERY_STEP)
    run, program = runs(1, words), (program_of(tmp_path, FITTING),)
    run.killed("step2", saved=1, program=program, MOST="120")
    run.finish(program=program, MOST="480")
    assert json.loads((run.path / "config.json").read_text())["accumulate_steps"] == 4


# --- other data, and damage


def test_another_run_is_refused_and_nothing_is_lost(half, tmp_path):
    run = half.copied(tmp_path, ranks=1)
    before = files_under(run.path)
    line = refusal(run.finish("--seed", "1", status=2))
    require_facts(line, "--seed 1: ... --seed 0, choose another --run, or remove the run")
    assert files_under(run.path) == before
