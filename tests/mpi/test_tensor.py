"""The layers of a BERT sliced over the ranks of a replica."""

import json

import pytest

from tests import texts
from tests.mpi.conftest import end_well, slow
from tests.mpi.interrupted import Runs, same_end
from tests.mpi.test_bert import BERT, EXACT, INTERRUPTED, WORDS, difference, exported


@pytest.mark.parametrize(
    ("ranks", "words", "more"),
    [
        (2, ("--task", "mlm", "--clip-norm", "0.5"), ()),
        slow(4, ("--task", "classify", "--clip-norm", "1e6", "--ema-epochs", "1"), ("--shard-optimizer",)),
    ],
)
def test_slices_give_the_weights_of_one_process(tmp_path, ranks, words, more):
    """Sums are taken in another order; 4 ranks are two replicas of two."""
    words = [*EXACT, "--epochs", "3", "--global-batch-size", "16", *words]
    whole = exported(tmp_path / "whole", 1, words, train=50, longest=60)
    words += ["--tensor", "2", "--check-replicas-every", "1", *more]
    assert difference(exported(tmp_path / "sliced", ranks, words, train=50, longest=60), whole) < 1e-6
    one, other = (json.loads((tmp_path / name / "runs/bert/r/result.json").read_text()) for name in ("whole", "sliced"))
    assert other["eval_loss"] == pytest.approx(one["eval_loss"], rel=1e-5)
    assert [(result["steps"], result["global_batch"]) for result in (one, other)] == [(12, 16)] * 2


SLICED = (*INTERRUPTED, "--tensor", "2", "--check-replicas-every", "1", "--epochs", "2")  # with dropout


@pytest.mark.slow
@pytest.mark.long  # stages and groups are killed in make test-slow
def test_a_run_in_slices_that_was_killed_ends_as_if_it_had_not_been(tmp_path, tmp_path_factory):
    folders = (tmp_path_factory.mktemp("whole"), tmp_path)
    whole, broken = (Runs(folder=folder, ranks=2, words=SLICED, script="bert") for folder in folders)
    for run in (whole, broken):
        texts.put(run.folder / "texts")
    whole.finish()
    broken.killed("step3", saved=2)
    broken.finish()
    same_end(broken, whole)


def test_a_nan_of_one_slice_is_skipped_by_all_and_named(tmp_path):
    texts.put(tmp_path / "texts")
    words = [*BERT, *WORDS, "--tensor", "2", "--global-batch-size", "8", "--epochs", "1"]
    said = end_well(tmp_path, "mpirun", 2, words, HVDTRAIN_FAULT="nan@rank1:step2")
    assert "step 2: skipped on all ranks, NaN or Inf in the loss of slice 1 of rank 1" in said
    assert json.loads((tmp_path / "runs" / "bert" / "r" / "result.json").read_text())["skipped_steps"] == 1
