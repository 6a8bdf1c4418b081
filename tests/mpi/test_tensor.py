"""The layers of a BERT sliced over the ranks of a replica."""

import json

import pytest
from safetensors.torch import load_file

from tests import texts
from tests.mpi.conftest import end_well, launcher_of, slow
from tests.mpi.interrupted import Runs, same_end
from tests.mpi.test_bert import BERT, INTERRUPTED, WORDS, difference

EXACT = (*WORDS, "--epochs", "5", "--dropout", "0", "--optimizer", "sgd", "--lr", "0.5", "--global-batch-size", "16")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("--task", "mlm", "--clip-norm", "0.5")),
        slow(4, ("--task", "classify", "--clip-norm", "1e6", "--ema-epochs", "1")),
    ],
)
def test_slices_give_the_weights_of_one_process(tmp_path, ranks, words):
    """Sums are taken in another order; 4 ranks are two replicas of two."""
    of_ranks = {}
    for count, more in ((1, ()), (ranks, ("--tensor", "2", "--check-replicas-every", "1"))):
        folder = tmp_path / str(count)
        folder.mkdir()
        texts.put(folder / "texts", train=50, longest=60)
        end_well(folder, launcher_of(count), count, [*BERT, *EXACT, *words, *more, "--export", "model"])
        of_ranks[count] = json.loads((folder / "runs/bert/r/result.json").read_text())
    weights = [load_file(tmp_path / str(count) / "model/model.safetensors") for count in (1, ranks)]
    assert difference(*weights) < 1e-6
    assert of_ranks[ranks]["eval_loss"] == pytest.approx(of_ranks[1]["eval_loss"], rel=1e-5)
    assert [(one["steps"], one["global_batch"]) for one in of_ranks.values()] == [(20, 16)] * 2


SLICED = (*INTERRUPTED, "--tensor", "2", "--check-replicas-every", "1", "--epochs", "2")  # with dropout


@pytest.mark.slow
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
