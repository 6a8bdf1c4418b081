"""A replica cut into stages: the same weights and statistics as in one process, what it saves, and how it ends."""

import json

import pytest
import torch
from safetensors.torch import load_file

from tests import texts
from tests.mpi.conftest import EFFNET, PROGRAMS, end_well, launcher_of, slow
from tests.mpi.interrupted import EVERY_STEP, TINY, Runs, refusal, same_end
from tests.mpi.test_bert import BERT, WORDS, difference
from tests.refusals import require_facts

# 8 steps of 62 or 63 images, so that the fourth micro-batch of some has one less.
FEW = (*TINY, "--images=503")
EPOCH = (*FEW, "--epochs", "1", "--dropout", "0", "--deterministic", "--report-every-steps", "5")


# The program cuts where its measurements say. Here a stage begins where maps have more than one pixel: across one pixel
# the last bits differ.
CUTS = {"2": ("--stages-at", "4"), "4": ("--stages-at", "2,4,5")}


ON_CPUS = (str(PROGRAMS / "on_cpus.py"), "effnet")  # with --precision fp16, or --compile without C++


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """The folder of a run of EfficientNet by ranks and words; it is run when it is first asked for."""
    known = {}

    def folder(ranks, *words, **env):
        key = ranks, words, *env.items()
        if key not in known:
            place = tmp_path_factory.mktemp("ended")
            is_on_cpus = "--precision" in words or {"--compile", "--recompute"} <= {*words}
            program = ON_CPUS if is_on_cpus else EFFNET
            cuts = CUTS[words[words.index("--stages") + 1]] if "--stages" in words else ()
            given = [*program, *EPOCH, *cuts, *words, "--run", "r"]
            (place / "said").write_text(end_well(place, launcher_of(ranks), ranks, given, **env))
            known[key] = place / "runs" / "effnet" / "r"
        return known[key]

    return folder


def hashes(folder):
    """Of the whole weights, as each rank has noted them."""
    return [json.loads(file.read_text())["weights_sha256"] for file in sorted(folder.glob("ranks/rank-*.json"))]


def best(folder):
    """Weights and running statistics of the best epoch."""
    [file] = folder.glob("checkpoints/best-*/weights.pt")
    return torch.load(file, weights_only=True)


def result(folder):
    return json.loads((folder / "result.json").read_text())


def assert_same_end(one, other):
    assert len({*hashes(one), *hashes(other)}) == 1
    assert list(best(one)) == list(best(other))
    assert all(torch.equal(value, best(other)[name]) for name, value in best(one).items())
    for name in ("eval_loss", "eval_accuracy", "steps", "skipped_steps", "loss_spikes", "global_batch"):
        assert result(one)[name] == result(other)[name]
    losses = [
        [
            [json.loads(line).get(name) for name in ("train/loss", "train/grad_norm")]
            for line in (folder / "metrics.jsonl").read_text().splitlines()
            if json.loads(line).get("event") != "behind"  # of the machine
        ]
        for folder in (one, other)
    ]
    assert losses[0] == losses[1]


BATCHES = ("--batch-size-per-rank", "16", "--accumulate-steps", "4", "--clip-norm", "0.5")


@pytest.mark.parametrize(
    ("ranks", "stages"),
    [(2, ["--stages", "2"]), slow(4, ["--stages", "4"]), slow(2, ["--stages", "2", "--pipeline-schedule", "gpipe"])],
)
def test_stages_give_the_bits_of_one_process(ended, ranks, stages):
    assert_same_end(ended(ranks, *BATCHES, *stages), ended(1, *BATCHES))


def test_what_stages_send_is_in_the_run_folder(ended):
    folder = ended(2, *BATCHES, "--stages", "2")
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
@pytest.mark.parametrize(("ranks", "rank"), [(2, 1), (4, 0)])
def test_stages_in_fp16_skip_what_one_process_skips_and_end_with_its_scale(ended, ranks, rank):
    """A NaN halves it."""
    words = *BATCHES, "--precision", "fp16"
    cut = ended(ranks, *words, "--stages", str(ranks), HVDTRAIN_FAULT=f"nan@rank{rank}:step7")
    assert_same_end(cut, ended(1, *words, HVDTRAIN_FAULT="nan@rank0:step7"))
    assert result(cut)["skipped_steps"] == 1
    scales = [
        [json.loads(line).get("train/loss_scale") for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (cut, ended(1, *words, HVDTRAIN_FAULT="nan@rank0:step7"))
    ]
    assert scales[0] == scales[1]
    assert {*scales[0]} == {None, 65536.0, 32768.0}


@pytest.mark.slow
def test_compiled_stages_and_blocks_are_those_of_one_process(ended):
    """Without C++, which takes minutes: see on_cpus.py. The last bits of a gradient grow tenfold in each step."""
    whole = ended(1, *BATCHES, "--precision", "fp32")  # by the same program
    folders = ended(2, *BATCHES, "--stages", "2", "--recompute", "--compile"), whole
    compiled, whole = (json.loads((folder / "metrics.jsonl").read_text().splitlines()[0]) for folder in folders)
    assert compiled["step"] == whole["step"] == 5
    assert compiled["train/loss"] == pytest.approx(whole["train/loss"], rel=1e-3)


@pytest.mark.slow
@pytest.mark.long  # a C++ compiler works for minutes
@pytest.mark.timeout(900)
def test_stages_in_cpp_learn_as_one_process(ended):
    compiled, whole = ended(2, *BATCHES, "--stages", "2", "--compile", MPIEXEC_TIMEOUT="900"), ended(1, *BATCHES)
    assert result(compiled)["eval_loss"] == pytest.approx(result(whole)["eval_loss"], rel=0.1)


SYNCED = ("--batch-size-per-rank", "8", "--accumulate-steps", "4", "--sync-bn")


@pytest.mark.slow
@pytest.mark.parametrize("words", [(), ("--recompute", "--pipeline-schedule", "gpipe")])
def test_batch_norm_over_the_replicas_of_each_stage_is_that_over_whole_replicas(ended, words):
    cut = ended(4, *SYNCED, "--check-replicas-every", "5", "--stages", "2", *words)
    assert_same_end(cut, ended(2, *SYNCED, "--check-replicas-every", "5"))
    assert hashes(cut) != hashes(ended(2, *SYNCED[:-1], "--check-replicas-every", "5"))


@pytest.mark.slow
def test_a_nan_in_batch_norm_over_replicas_is_skipped_by_all(ended):
    cut = ended(4, *SYNCED, "--stages", "2", HVDTRAIN_FAULT="nan@rank2:step7")
    assert result(cut)["skipped_steps"] == 1
    assert_same_end(cut, ended(2, *SYNCED, HVDTRAIN_FAULT="nan@rank1:step7"))


@pytest.mark.slow
@pytest.mark.parametrize("words", [("--stages", "2"), ()])
def test_what_is_computed_again_changes_no_bit(ended, words):
    assert_same_end(ended(2 if words else 1, *BATCHES, "--recompute", *words), ended(1, *BATCHES))


@pytest.mark.slow
def test_where_it_is_cut_does_not_matter(ended):
    larger = {"TESTS_SIDE": "32"}  # of smaller ones maps of one pixel cross this cut, and the last bits differ
    cut = ended(2, *BATCHES, "--stages", "2", "--stages-at", "6", **larger)
    assert_same_end(cut, ended(1, *BATCHES, **larger))
    assert json.loads((cut / "config.json").read_text())["derived"]["stages_at"] == [6]
    assert "the same again with --stages-at 6" in (cut.parents[2] / "said").read_text()


@pytest.mark.slow
def test_a_step_of_fewer_micro_batches_than_stages_is_the_same(ended):
    """Two steps of 251 and 252 images take three micro-batches of at most 113, on four stages."""
    few = "--global-batch-size", "452", "--accumulate-steps", "4"
    assert_same_end(ended(4, *few, "--stages", "4"), ended(1, *few))


def test_a_nan_on_one_stage_is_skipped_by_all_and_named(ended):
    alone = ended(1, *BATCHES, HVDTRAIN_FAULT="nan@rank0:step7")
    cut = ended(2, *BATCHES, "--stages", "2", HVDTRAIN_FAULT="nan@rank0:step7")
    assert result(cut)["skipped_steps"] == 1
    assert_same_end(cut, alone)
    named = "step 7: skipped on all ranks, NaN or Inf in the forward pass of stage 0 of rank 0"
    assert named in (cut.parents[2] / "said").read_text()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """The exported weights of a BERT after three epochs, by ranks, task and other words."""
    known = {}

    def weights(ranks, task, *words):
        key = ranks, task, words
        if key not in known:
            folder = tmp_path_factory.mktemp("exported")
            texts.put(folder / "texts", train=50, longest=60)
            given = [*BERT, *WORDS, "--task", task, "--epochs", "5", "--dropout", "0", "--export", "model"]
            given += ["--optimizer", "sgd", "--lr", "0.5", "--global-batch-size", "16", "--accumulate-steps", "4"]
            end_well(folder, launcher_of(ranks), ranks, [*given, *words])
            known[key] = load_file(folder / "model" / "model.safetensors")
        return known[key]

    return weights


LOOSE = ("--clip-norm", "1e6")
MODELS = {"2": "bert_tiny", "4": "bert_mini"}  # of 3 and 5 blocks


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "stages", "precision"), [(2, "2", "bf16"), (4, "4", "fp32")])
def test_a_classifier_of_texts_in_stages_has_the_bits_of_one_process(exported, ranks, stages, precision):
    """Each micro-batch has a length of its own."""
    words = *LOOSE, "--model", MODELS[stages], "--precision", precision
    assert difference(exported(ranks, "classify", *words, "--stages", stages), exported(1, "classify", *words)) == 0


CLIPPED = ("--clip-norm", "0.5")


@pytest.mark.parametrize(
    ("ranks", "stages", "task", "clip"),
    [
        (2, "2", "mlm", CLIPPED),
        slow(4, "4", "mlm", LOOSE),  # to clip hides a wrong scale
        slow(4, "2", "mlm", LOOSE),
        slow(4, "2", "classify", CLIPPED),
    ],
)
def test_tied_embeddings_and_norms_over_stages_are_those_of_one_process(exported, ranks, stages, task, clip):
    """The gradients of two places, or squares of all stages, are added in another order."""
    model = "--model", MODELS[stages]
    whole = exported(1, task, *clip, *model)
    assert difference(exported(ranks, task, *clip, *model, "--stages", stages), whole) < 1e-6


@pytest.mark.slow
def test_another_norm_would_be_noticed(exported):
    words = "--model", MODELS["2"]
    assert difference(exported(1, "mlm", "--clip-norm", "0.4", *words), exported(1, "mlm", *CLIPPED, *words)) > 1e-4


SAVED = (*FEW, *BATCHES, "--epochs", "1", "--dropout", "0", "--deterministic", *EVERY_STEP)


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of 4 stages that was killed after step 5."""
    run = Runs(folder=tmp_path_factory.mktemp("half"), ranks=4, words=(*SAVED, "--stages", "4", *CUTS["4"]))
    run.killed("step6", saved=5)
    return run


@pytest.mark.parametrize("stages", [slow(1), slow(2), slow(4)])
def test_what_four_stages_have_saved_goes_on_with_one_two_or_four(half, tmp_path, reference, stages):
    """Without dropout no rank draws random numbers, so all ends are alike."""
    cuts = CUTS["2"] if stages == 2 else ()
    run = half.copied(tmp_path, ranks=stages, words=(*SAVED, "--stages", str(stages), *cuts))
    said = run.finish()
    assert "resumed from runs/effnet/r/checkpoints/step-000000005, epoch 1" in said
    then = json.loads((half.path / "checkpoints" / "step-000000005" / "manifest.json").read_text())
    if stages == 4:
        now = json.loads((run.path / "config.json").read_text())
        assert now["derived"]["stages_at"] == then["about"]["stages_at"]
    same_end(run, reference(1, SAVED))


@pytest.mark.slow
def test_the_loss_scale_of_two_stages_goes_on_in_one_process(tmp_path, ended):
    words = (*SAVED, "--precision", "fp16")
    run = Runs(folder=tmp_path, ranks=2, words=(*words, "--stages", "2"))
    run.killed("step6", saved=5, program=ON_CPUS)
    run = Runs(folder=tmp_path, ranks=1, words=words)
    run.finish(program=ON_CPUS)
    assert run.weights == {*hashes(ended(1, *BATCHES, "--precision", "fp16"))}


@pytest.mark.slow
def test_batch_norm_over_replicas_goes_on_with_the_same_bits(tmp_path, reference):
    words = (*FEW, *SYNCED, "--stages", "2", *CUTS["2"], "--epochs", "1", "--dropout", "0", *EVERY_STEP)
    run = Runs(folder=tmp_path, ranks=4, words=words)
    run.killed("step6", saved=5)
    run.finish()
    same_end(run, reference(4, words))


def test_what_one_process_has_saved_goes_on_in_stages(tmp_path, reference):
    run = Runs(folder=tmp_path, ranks=1, words=SAVED)
    run.killed("step6", saved=5)
    run = Runs(folder=tmp_path, ranks=2, words=(*SAVED, "--stages", "2", *CUTS["2"]))
    run.finish()
    same_end(run, reference(1, SAVED))


@pytest.mark.parametrize(
    ("ranks", "words", "line"),
    [
        slow(
            3,
            ["--stages", "2"],
            "--stages 2: 3 ranks ... 2 or 4, or ... --stages 1",
        ),
        (
            2,
            ["--stages", "2", "--accumulate-steps", "1"],
            "--stages 2 requires --accumulate-steps 2 or more",
        ),
        slow(2, ["--stages", "2", "--stages-at", "9"], "--stages-at 9: ... blocks 0 to 7"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(run, tmp_path, ranks, words, line):
    done = run("mpirun", ranks, [*EFFNET, *EPOCH, *BATCHES, *words, "--run", "r"])
    assert done.returncode == 2
    require_facts(refusal(done.stdout + done.stderr), line)
    assert not (tmp_path / "runs").exists()
