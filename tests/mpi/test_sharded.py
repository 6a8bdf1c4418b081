"""Ranks that divide the optimizer's state: the bits, the checkpoints and the skipped steps of ranks that do not."""

import pytest

from tests.mpi.conftest import long, slow
from tests.mpi.interrupted import TINY, files_under, same_end
from tests.mpi.test_bert import EXACT, difference, exported
from tests.mpi.test_stages import ON_CPUS

DIVIDED = "--shard-optimizer"
FEW = (*TINY, "--images=503", "--epochs", "1", "--report-every-steps", "3", "--checkpoint-every", "3steps")
SMALL = (*FEW, "--batch-size-per-rank", "32")
HALF = ("--batch-size-per-rank", "16", "--accumulate-steps", "2")


def tensors(run):
    """What its checkpoints and its best weights hold, by file."""
    files = files_under(run.path / "checkpoints")
    return {name: content for name, content in files.items() if name.endswith(".pt")}


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        (2, (*SMALL, "--optimizer", "adamw")),
        slow(2, (*FEW, *HALF, "--optimizer", "rmsprop", "--compression", "fp16", "--precision", "bf16")),
        long(3, (*SMALL, "--deterministic", "--sync-bn")),  # three go on in make test-slow, below
        slow(4, (*FEW, *HALF, "--stages", "0,4", "--clip-value", "0.01")),
    ],
)
def test_bits_and_checkpoints_are_those_of_a_run_that_divides_nothing(runs, reference, ranks, words):
    run, whole = runs(ranks, (*words, DIVIDED)), reference(ranks, words)
    run.finish()
    same_end(run, whole, whole_history=False)  # norms of gradients are rounded otherwise
    assert tensors(run).keys() == tensors(whole).keys()
    assert [name for name, content in tensors(run).items() if content != tensors(whole)[name]] == []


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, long(1)])
def test_other_ranks_continue_what_some_have_divided(runs, tmp_path, ranks):
    """With the same bits whether these divide it or not."""
    words = (*SMALL, "--optimizer", "adamw", "--deterministic")
    half = runs(2, (*words, DIVIDED))
    half.killed("step5", saved=3)
    again = [
        half.copied(tmp_path / name, ranks=ranks, words=more)
        for name, more in (("divided", (*words, DIVIDED)), ("whole", words))
    ]
    for run in again:
        assert "resumed from runs/effnet/r/checkpoints/step-000000003, epoch 1" in run.finish()
    same_end(*again, whole_history=False)
    assert tensors(again[0]) == tensors(again[1])


@pytest.mark.slow
def test_all_ranks_skip_a_step_in_fp16_and_lower_their_scale(runs):
    words = (*SMALL, "--images=189", "--precision", "fp16", "--find-nan", "--on-spike", "skip")
    run = runs(2, (*words, "--report-every-steps", "1", DIVIDED))
    said = run.finish(program=ON_CPUS, HVDTRAIN_FAULT="nan@rank1:step2")
    assert "step 2: skipped on all ranks, NaN or Inf in the loss of rank 1" in said
    skipped = [line["step"] for line in run.lines if line.get("event") == "skipped"]
    assert skipped in ([2], [1, 2])  # with some CPUs' kernels the gradients of the first step overflow
    assert (run.result["skipped_steps"], len(run.weights)) == (len(skipped), 1)
    *_, scale = (line["train/loss_scale"] for line in run.lines if "train/loss_scale" in line)
    assert scale == 65536.0 / 2 ** len(skipped)


@pytest.mark.slow
def test_stages_divide_a_tied_matrix_alike(tmp_path):
    """The first and the last stage hold the embeddings, and sum their gradients."""
    words = [*EXACT, "--task", "mlm", "--optimizer", "adamw", "--lr", "1e-3", "--clip-norm", "1e6", "--max-steps", "6"]
    words += ["--global-batch-size", "8", "--stages", "0,1", "--accumulate-steps", "2"]
    whole, divided = (exported(tmp_path / name, 4, [*words, *more]) for name, more in (("w", []), ("d", [DIVIDED])))
    assert difference(divided, whole) == 0
