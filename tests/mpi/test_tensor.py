"""The layers of a BERT sliced over the ranks of a replica."""

import json

import pytest
from safetensors.torch import load_file

from tests import texts
from tests.mpi.conftest import PROGRAMS, end_well, launcher_of, slow
from tests.mpi.interrupted import Runs, refusal, same_end
from tests.mpi.test_bert import BERT, INTERRUPTED, WORDS, difference
from tests.refusals import require_facts

EXACT = (*WORDS, "--epochs", "5", "--dropout", "0", "--optimizer", "sgd", "--lr", "0.5", "--global-batch-size", "16")


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The exported weights of a BERT after 20 steps, by ranks and words."""
    known = {}

    def weights(ranks, *words):
        key = ranks, *words
        if key not in known:
            folder = tmp_path_factory.mktemp("exported")
            texts.put(folder / "texts", train=50, longest=60)
            program = [str(PROGRAMS / "on_cpus.py"), "bert"] if "fp16" in words else BERT
            given = [*program, *EXACT, *words, "--export", "model"]
            end_well(folder, launcher_of(ranks), ranks, given)
            result = json.loads((folder / "runs" / "bert" / "r" / "result.json").read_text())
            known[key] = load_file(folder / "model" / "model.safetensors"), result
        return known[key]

    return weights


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, ("--task", "mlm", "--clip-norm", "0.5")),
        slow(2, ("--task", "mlm", "--clip-norm", "1e6", "--freeze-embeddings")),
        slow(4, ("--task", "classify", "--clip-norm", "1e6", "--ema-epochs", "1")),
    ],
)
def test_slices_give_the_weights_of_one_process(exported, ranks, words):
    """Sums are taken in another order; 4 ranks are two replicas of two."""
    whole, of_whole = exported(1, *words)
    found, result = exported(ranks, *words, "--tensor", "2", "--check-replicas-every", "1")
    assert difference(found, whole) < 1e-6
    assert result["eval_loss"] == pytest.approx(of_whole["eval_loss"], rel=1e-5)
    assert (result["steps"], result["global_batch"]) == (of_whole["steps"], of_whole["global_batch"]) == (20, 16)


@pytest.mark.slow
def test_slices_in_fp16_are_within_its_rounding_of_one_process(exported):
    words = "--task", "mlm", "--clip-norm", "0.5", "--precision", "fp16"
    (whole, of_whole), (found, of_found) = exported(1, *words), exported(2, *words, "--tensor", "2")
    assert of_found["skipped_steps"] == of_whole["skipped_steps"]
    assert 0 < difference(found, whole) < 1e-3


@pytest.mark.slow
def test_another_norm_would_be_noticed(exported):
    words = "--task", "mlm", "--clip-norm"
    assert difference(exported(1, *words, "0.4")[0], exported(1, *words, "0.5")[0]) > 1e-4


@pytest.mark.slow
def test_what_is_computed_again_changes_no_bit(exported):
    words = "--tensor", "2", "--task", "mlm", "--dropout", "0.1"
    assert difference(exported(2, *words, "--recompute")[0], exported(2, *words)[0]) == 0


SLICED = (*INTERRUPTED, "--tensor", "2", "--check-replicas-every", "1", "--epochs", "2")  # with dropout


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of 2 slices that was killed after step 2."""
    run = Runs(folder=tmp_path_factory.mktemp("half"), ranks=2, words=SLICED, script="bert")
    texts.put(run.folder / "texts")
    run.killed("step3", saved=2)
    return run


@pytest.mark.slow
def test_a_run_in_slices_that_was_killed_ends_as_if_it_had_not_been(half, tmp_path):
    texts.put(tmp_path / "texts")
    broken = half.copied(tmp_path)
    broken.finish()
    (tmp_path / "whole").mkdir()
    texts.put(tmp_path / "whole" / "texts")
    whole = Runs(folder=tmp_path / "whole", ranks=2, words=SLICED, script="bert")
    whole.finish()
    same_end(broken, whole)


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        slow(1, ()),
        slow(2, ("--stages", "2", "--accumulate-steps", "2")),
        slow(4, ("--tensor", "2", "--check-replicas-every", "1")),
    ],
)
def test_what_two_slices_have_saved_goes_on_otherwise(half, tmp_path, ranks, words):
    texts.put(tmp_path / "texts")
    run = half.copied(tmp_path, ranks=ranks, words=(*INTERRUPTED, "--epochs", "2", *words))
    assert "resumed from runs/bert/r/checkpoints/step-000000002, epoch 1" in run.finish()
    assert len(run.weights) == 1


@pytest.mark.slow
def test_checkpoints_of_one_process_go_on_in_slices_and_back(tmp_path):
    """Without dropout, to the weights of a run that was never sliced but for rounding."""
    folders = [tmp_path / "whole", tmp_path / "sliced"]
    words = (*EXACT, "--clip-norm", "0.5", "--checkpoint-every-steps", "1", "--export", "model")
    for folder in folders:
        texts.put(folder / "texts", train=50, longest=60)
    Runs(folder=folders[0], ranks=1, words=words, script="bert").finish()
    for ranks, place, saved in ((1, "step6", 5), (2, "step11", 10), (1, None, 20)):
        more = ("--tensor", "2") if ranks == 2 else ()
        run = Runs(folder=folders[1], ranks=ranks, words=(*words, *more), script="bert")
        if place is None:
            run.finish()
        else:
            run.killed(place, saved=saved)
    weights = [load_file(folder / "model" / "model.safetensors") for folder in folders]
    assert difference(*weights) < 1e-6


@pytest.mark.parametrize("rank", [0, slow(1)])
def test_a_nan_of_one_slice_is_skipped_by_all_and_named(tmp_path, rank):
    texts.put(tmp_path / "texts")
    words = [*BERT, *WORDS, "--tensor", "2", "--global-batch-size", "8", "--epochs", "1"]
    said = end_well(tmp_path, "mpirun", 2, words, HVDTRAIN_FAULT=f"nan@rank{rank}:step2")
    assert f"step 2: skipped on all ranks, NaN or Inf in the loss of slice {rank} of rank {rank}" in said
    assert json.loads((tmp_path / "runs" / "bert" / "r" / "result.json").read_text())["skipped_steps"] == 1


@pytest.mark.slow
def test_a_flipped_bit_of_what_all_slices_have_ends_the_run(run, tmp_path):
    texts.put(tmp_path / "texts")
    words = [*BERT, *WORDS, "--tensor", "2", "--global-batch-size", "8", "--check-replicas-every", "1"]
    done = run("mpirun", 2, words, HVDTRAIN_FAULT="bitflip@rank1:step2")
    assert done.returncode == 4
    assert "replicas differ after step 2: rank 1 from the others, first in bert.embeddings." in done.stderr


@pytest.mark.parametrize(
    ("ranks", "tensor", "line"),
    [
        (2, "4", "--tensor 4: 2 ranks ... 4, or ... --tensor 2"),
        slow(4, "4", "--tensor 4: ... 2 heads ... --tensor 2"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(run, tmp_path, ranks, tensor, line):
    texts.put(tmp_path / "texts")
    done = run("mpirun", ranks, [*BERT, *WORDS, "--tensor", tensor])
    assert done.returncode == 2
    require_facts(refusal(done.stdout + done.stderr), line)
    assert not (tmp_path / "runs").exists()
