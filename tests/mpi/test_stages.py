"""A replica cut into stages: the same weights and statistics as in one process, what it saves, and how it ends."""

import json
import sys
from functools import cache

import pytest
import torch

from tests.mpi.conftest import EFFNET, PROGRAMS, long, slow
from tests.mpi.interrupted import EVERY_STEP, TINY, Runs, same_end
from tests.mpi.launched import argv, finished, lines
from tests.mpi.test_bert import EXACT, difference, exported
from tests.refusals import require_facts

# 8 steps of 62 or 63 images, so that the fourth micro-batch of some has one less.
FEW = (*TINY, "--images=503")
EPOCH = (*FEW, "--epochs", "1", "--dropout", "0", "--deterministic", "--report-every-steps", "5")
# The program cuts where its measurements say. Here a stage begins where maps have more than one pixel: across one pixel
# the last bits differ.
CUTS = {"2": "0,4", "4": "0,2,4,5"}
ON_CPUS = (str(PROGRAMS / "on_cpus.py"), "effnet")  # with --precision fp16


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run of EfficientNet by ranks and words; it is run when it is first asked for."""

    @cache
    def run(ranks, *words, **env):
        stages = words[words.index("--stages") + 1] if "--stages" in words else "1"
        cut = ("--stages", CUTS.get(stages, stages))  # the last counts
        one = Runs(folder=tmp_path_factory.mktemp("ended"), ranks=ranks, words=(*EPOCH, *words, *cut))
        one.finish(program=ON_CPUS if "--precision" in words else None, **env)
        return one

    return run


def assert_same_end(one, other, **options):
    same_end(one, other, **options)
    weights, others = (
        torch.load(*run.path.glob("checkpoints/best-*/weights.pt"), weights_only=True) for run in (one, other)
    )
    assert list(weights) == list(others)
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


BATCHES = ("--batch-size-per-rank", "16", "--accumulate-steps", "4", "--clip-norm", "0.5")
RECOMPUTED = ("--recompute", "--pipeline-schedule", "gpipe")


@pytest.mark.parametrize(("stages", "words"), [(2, ()), slow(4, ()), slow(2, RECOMPUTED)])
def test_stages_give_the_bits_of_one_process(ended, stages, words):
    assert_same_end(ended(stages, *BATCHES, "--stages", str(stages), *words), ended(1, *BATCHES))


def test_what_stages_send_is_in_the_run_folder(ended):
    folder = ended(2, *BATCHES, "--stages", "2").path
    first, last = json.loads((folder / "traffic.json").read_text())["parts"]
    parameters = json.loads((folder / "config.json").read_text())["derived"]["parameters"]
    assert first["gradient_bytes"] + last["gradient_bytes"] == 4 * parameters
    [exchange] = first["exchanges"]
    assert exchange["part"] == 1
    assert exchange["bytes"] > 0
    assert (last["exchanges"], first["sums_bytes"], last["sums_bytes"]) == ([], 0, 0)


@pytest.mark.slow
def test_replicas_of_stages_give_the_bits_of_whole_replicas(ended):
    """Two ranks have one order of a sum, so also over the two replicas of each stage."""
    words = ("--batch-size-per-rank", "8", "--accumulate-steps", "4", "--check-replicas-every", "5")
    assert_same_end(ended(4, *words, "--stages", "2"), ended(2, *words))


@pytest.mark.slow
@pytest.mark.long  # a step in fp16 is skipped by all ranks in test_sharded, too
def test_stages_in_fp16_skip_what_one_process_skips_and_end_with_its_scale(ended):
    """A NaN halves it."""
    words = *BATCHES, "--precision", "fp16", "--images=189", "--report-every-steps", "1"
    cut = ended(2, *words, "--stages", "2", HVDTRAIN_FAULT="nan@rank1:step2")
    whole = ended(1, *words, HVDTRAIN_FAULT="nan@rank0:step2")
    assert_same_end(cut, whole, whole_history=False)  # the place of a NaN is another
    for name in ("train/loss", "train/grad_norm"):
        assert [line.get(name) for line in cut.history()] == [line.get(name) for line in whole.history()]
    assert cut.result["skipped_steps"] == 1
    for run in (cut, whole):
        assert {line.get("train/loss_scale") for line in run.lines} == {None, 65536.0, 32768.0}


SYNCED = ("--batch-size-per-rank", "8", "--accumulate-steps", "4", "--sync-bn")


@pytest.mark.slow
def test_batch_norm_over_the_replicas_of_each_stage_is_that_over_whole_replicas(ended):
    words = (*SYNCED, "--check-replicas-every", "2", "--images=251")
    assert_same_end(ended(4, *words, "--stages", "2"), ended(2, *words))


@pytest.mark.slow
def test_a_step_of_fewer_micro_batches_than_stages_is_the_same(ended):
    """Two steps of 251 and 252 images take three micro-batches of at most 113, on four stages."""
    few = "--global-batch-size", "452", "--accumulate-steps", "4"
    assert_same_end(ended(4, *few, "--stages", "4"), ended(1, *few))


def test_a_nan_on_one_stage_is_skipped_by_all_and_named(ended):
    cut = ended(2, *BATCHES, "--stages", "2", HVDTRAIN_FAULT="nan@rank0:step7")
    assert (cut.result["skipped_steps"], len(cut.weights)) == (1, 1)
    assert "step 7: skipped on all ranks, NaN or Inf in the forward pass of stage 0 of rank 0" in cut.said


MODELS = {2: "bert_tiny", 4: "bert_mini"}  # by stages: of 3 and 5 blocks


@pytest.mark.parametrize(
    ("ranks", "stages", "words", "most"),
    [
        (2, 2, ("--task", "mlm", "--clip-norm", "0.5"), 1e-6),
        long(4, 2, ("--task", "mlm", "--clip-norm", "1e6"), 1e-6),  # to clip hides a wrong scale
        long(4, 4, ("--task", "classify", "--clip-norm", "1e6"), 0),
    ],
)
def test_a_bert_in_stages_has_the_weights_of_one_process(tmp_path, ranks, stages, words, most):
    """Each micro-batch has a length of its own. Gradients of embeddings that are tied, and squares of all stages, are
    added in another order."""
    words = (*EXACT, *words, "--model", MODELS[stages], "--epochs", "2")
    words = (*words, "--global-batch-size", "16", "--accumulate-steps", "4")
    whole = exported(tmp_path / "whole", 1, words, train=50, longest=60)
    cut = exported(tmp_path / "cut", ranks, [*words, "--stages", str(stages)], train=50, longest=60)
    assert difference(cut, whole) <= most


SAVED = (*FEW, *BATCHES, "--epochs", "1", "--dropout", "0", "--deterministic", *EVERY_STEP)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of 4 stages that was killed after step 5."""
    run = Runs(folder=tmp_path_factory.mktemp("half"), ranks=4, words=(*SAVED, "--stages", CUTS["4"]))
    run.killed("step6", saved=5)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("stages", [long(1), 4])
def test_what_four_stages_have_saved_goes_on_with_one_or_four(half, tmp_path, reference, stages):
    """Without dropout no rank draws random numbers, so all ends are alike."""
    run = half.copied(tmp_path, ranks=stages, words=(*SAVED, "--stages", str(stages)))
    said = run.finish()
    assert "resumed from runs/effnet/r/checkpoints/step-000000005, epoch 1" in said
    then = json.loads((half.path / "checkpoints" / "step-000000005" / "manifest.json").read_text())
    if stages == 4:
        now = json.loads((run.path / "config.json").read_text())
        assert now["derived"]["stages_at"] == then["about"]["stages_at"]
    same_end(run, reference(1, SAVED))


@pytest.mark.slow
def test_what_one_process_has_saved_goes_on_in_stages(tmp_path, reference):
    run = Runs(folder=tmp_path, ranks=1, words=SAVED)
    run.killed("step6", saved=5)
    run = Runs(folder=tmp_path, ranks=2, words=(*SAVED, "--stages", CUTS["2"]))
    run.finish()
    same_end(run, reference(1, SAVED))


# --- under hvdlaunch

TRAIN = [sys.executable, *EFFNET, *TINY, *BATCHES, "--stages", CUTS["2"], "--epochs", "1", "--run", "r"]


def test_the_launchers_groups_must_be_the_stages(tmp_path):
    done = finished(tmp_path, argv("-np", "4", program=TRAIN))
    assert done.returncode == 2
    [line] = lines(done)
    require_facts(line, "hvdtrain: error: --stages 2: ... without --ranks-per-replica ... --ranks-per-replica 2")
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_the_stage_that_keeps_the_others_waiting_is_named(tmp_path):
    words = argv("-np", "4", "--ranks-per-replica", "2", program=[*TRAIN, "--hang-timeout-s", "8"])
    done = finished(tmp_path, words, HVDTRAIN_FAULT="sleep@rank1:step7")
    assert done.returncode != 0
    [line] = [line for line in lines(done) if line.startswith("hvdlaunch: error: ")]
    said = "rank 1 on localhost hung at step 7: no progress for 0:00:08; rank 1 is outside of hvdtrain's calls"
    require_facts(line, f"{said} ... rank 0 waits in exchange ... it stood here:")
