"""A run that was interrupted ends as if it had not been: the same bits, and each step once in its logs."""

import itertools
import json
import math
from dataclasses import replace

import pytest

from tests.mpi.conftest import PROGRAMS, TIMEOUT_S, program_of, slow, wait_until
from tests.mpi.interrupted import EVERY_STEP, SHORT, TINY, WHOLE, Runs, files_under, refusal, same_end
from tests.refusals import require_facts

BY_HOROVOD = (*SHORT, "--reducer", "horovod")


@pytest.fixture(scope="module")
def half(tmp_path_factory):
    """A run of 2 ranks that was killed after step 1 and after step 4, with checkpoints of steps 3 and 4."""
    run = Runs(folder=tmp_path_factory.mktemp("half"), ranks=2, words=BY_HOROVOD)
    run.killed("step2", saved=1)
    run.killed("step5", saved=4)
    return run


# --- the same number of ranks


def interrupted(run, ends):
    """Killed at each of these places, then run to its end."""
    for place, saved in ends:
        run.killed(place, saved=saved)
    said = run.finish()
    assert f"resumed from runs/effnet/r/checkpoints/step-{ends[-1][1]:09d}, epoch " in said


def test_from_step_1_from_the_middle_and_from_the_end_of_an_epoch(half, tmp_path, reference):
    run = half.copied(tmp_path)
    interrupted(run, [("eval1", 6)])
    same_end(run, reference(2, BY_HOROVOD))
    assert run.result["resumed"] == 3


@pytest.mark.slow
def test_a_run_keeps_the_stride_of_its_stem_where_the_program_would_choose_another(tmp_path, tmp_path_factory):
    run = Runs(folder=tmp_path, ranks=2, words=WHOLE)
    run.killed("step9", saved=8, TESTS_SIDE="32")  # of the program's own digits
    run.finish(program=("-m", "hvdtrain.effnet"))
    assert json.loads((run.path / "config.json").read_text())["stem_stride"] == 2
    whole = Runs(folder=tmp_path_factory.mktemp("whole"), ranks=2, words=WHOLE)
    whole.finish(TESTS_SIDE="32")
    same_end(run, whole)


@pytest.mark.slow
def test_three_ranks(runs, reference):
    words = (*TINY, "--batch-size-per-rank", "64", "--epochs", "1", *EVERY_STEP, "--deterministic", "--sync-bn")
    run = runs(3, words)
    interrupted(run, [("step5", 4)])
    same_end(run, reference(3, words))


MIX = {
    "adamw": (2, ["--accumulate-steps", "2", "--batch-size-per-rank", "32", "--dropout", "0.3"], [1, 6]),
    "bf16": (
        2,
        ["--precision=bf16", "--compression=fp16", "--optimizer=rmsprop", "--ema-epochs", "0", "--epochs", "1"],
        [3],
    ),
    "lamb": (2, ["--optimizer", "lamb", "--sync-bn", "--clip-norm", "1", "--ema-epochs", "0"], [2, 6]),
    "lars": (3, ["--optimizer", "lars", "--deterministic", "--check-replicas-every", "3", "--cutout", "6"], [4, 6]),
    "one": (1, ["--stochastic-depth", "0.3", "--schedule", "constant", "--decay-all", "--no-augment"], [3, 12]),
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MIX)
def test_every_way_to_train(runs, reference, name):
    ranks, words, ends = MIX[name]
    words = (*SHORT, *words)
    per_epoch = math.ceil(768 / (64 * ranks))
    run = runs(ranks, words)
    interrupted(run, [("eval1" if step == per_epoch else f"step{step + 1}", step) for step in ends])
    same_end(run, reference(ranks, words))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_image_folders_with_loader_workers(runs, reference, tmp_path):
    folder_of_images(tmp_path / "images")
    words = ("--data", "imagefolder", "--data-dir", str(tmp_path / "images"), "--model", "efficientnet_tiny")
    words = (*words, "--batch-size-per-rank", "8", "--epochs", "2", "--dropout", "0.5", *EVERY_STEP)
    run = runs(2, words)
    interrupted(run, [("step3", 2), ("eval1", 4)])
    same_end(run, reference(2, words))


def folder_of_images(folder):
    """Two classes of 40: 64 to train on."""
    import numpy as np
    from PIL import Image

    noise = np.random.default_rng(0)
    for label in ("a", "b"):
        (folder / label).mkdir(parents=True)
        for number in range(40):
            Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / label / f"{number}.png")


SPIKE = "spike@rank1:step"  # of the loss, which needs 10 steps before it


@pytest.mark.slow
def test_spikes_are_skipped_by_the_losses_before_the_interruption(runs, tmp_path):
    words = (*WHOLE, "--on-spike", "skip", "--checkpoint-every-steps", "7")
    run, whole = runs(2, words), Runs(folder=tmp_path / "whole", ranks=2, words=words)
    whole.folder.mkdir()
    whole.finish(HVDTRAIN_FAULT=f"{SPIKE}13,{SPIKE}19")
    run.killed(f"step15,{SPIKE}13", saved=14)
    run.finish(HVDTRAIN_FAULT=f"{SPIKE}19")
    same_end(run, whole)
    assert run.result["skipped_steps"] == 2


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


# --- another number of ranks


def visits(folder, steps=None):
    """The images of all ranks, by step."""
    ranks = [[json.loads(line) for line in file.read_text().splitlines()] for file in sorted(folder.iterdir())]
    return [[image for rank in step for image in rank] for step in zip(*ranks, strict=True)][:steps]


NOTING = (str(PROGRAMS / "note_visits.py"),)


TOLD = {
    "--batch-size-per-rank": "the batch per rank is kept, 192 images per step in place of 128",
    "--global-batch-size": "the global batch is kept, 96 images per step in place of 96",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "batch", "sizes"),  # of the batches before the stop, after it, and in the second epoch
    [
        ((2, 3), ["--batch-size-per-rank", "64"], ({119, 120}, {167, 168}, {179, 180})),
        ((3, 2), ["--global-batch-size", "96"], ({95, 96}, {95, 96}, {95, 96})),
    ],
)
def test_every_image_once_over_both_attempts(runs, tmp_path, ranks, batch, sizes):
    words = (*TINY, *batch, "--epochs", "2", "--no-scale-lr", "--checkpoint-every-steps", "1")
    words = (*words, "--report-every-steps", "1", "--warmup-epochs", "0")
    first, second = (runs(count, words) for count in ranks)
    first.killed("step6", saved=5, program=(*NOTING, str(tmp_path / "first")))
    said = second.finish(program=(*NOTING, str(tmp_path / "second")))
    kept = f"{ranks[1]} ranks in place of {ranks[0]}: {TOLD[batch[0]]}"
    assert f"{kept}; random numbers are new ones" in said.splitlines()

    steps = visits(tmp_path / "first", 5) + visits(tmp_path / "second")
    seen = [image for step in steps for image in step]
    assert sorted(seen[:1438]) == list(range(1438))
    assert sorted(seen[1438:]) == list(range(1438))

    places = [divmod(done, 1438) for done in itertools.accumulate(map(len, steps[:-1]), initial=0)]
    half = [epoch for epoch, _ in places].index(1)
    assert tuple({len(step) for step in part} for part in (steps[:5], steps[5:half], steps[half:])) == sizes

    # one curve over the images, whatever the batch they came in
    rates = [0.05 * (1 + math.cos(math.pi * (epoch + visited / 1438) / 2)) for epoch, visited in places]
    assert [line["train/lr"] for line in second.lines if "epoch" not in line] == pytest.approx(rates)


# --- other settings, and damage


@pytest.mark.slow
def test_a_changed_setting_is_named_and_the_command_lines_holds(half, tmp_path):
    run = half.copied(tmp_path, ranks=1)
    said = run.finish("--epochs", "1", "--lr", "0.01", "--weight-decay", "0.1").splitlines()
    assert "--epochs was 2, now 1: the command line's holds" in said
    assert "--lr was None, now 0.01: the command line's holds" in said
    assert "--weight-decay was 0.0005, now 0.1: the command line's holds" in said
    assert run.result["epochs"] == 1
    assert [line["epoch"] for line in run.lines if "epoch" in line] == [1]


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--seed", "1"], "--seed 1: ... --seed 0, choose another --run, or remove the run"),
        pytest.param(["--optimizer", "lamb"], "--optimizer lamb: ... sgd", marks=pytest.mark.slow),
        pytest.param(["--model", "efficientnet_b0"], "checkpoint ... efficientnet_tiny", marks=pytest.mark.slow),
        pytest.param(["--data", "synthetic"], "training images: ... 768, now there are 50000", marks=pytest.mark.slow),
    ],
)
def test_another_run_is_refused_and_nothing_is_lost(half, tmp_path, words, named):
    run = half.copied(tmp_path, ranks=1)
    before = files_under(run.path)
    said = run.finish(*words, status=2)
    require_facts(refusal(said), named)
    assert files_under(run.path) == before


def damage(run, name, file="state.pt"):
    path = run.path / "checkpoints" / name / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("file", [slow("state.pt"), "ranks/1.pt"])
def test_a_damaged_checkpoint_is_passed_over_by_name(half, tmp_path, reference, file):
    run = half.copied(tmp_path)
    damage(run, "step-000000004", file)
    said = run.finish()
    assert f"hvdtrain: warning: runs/effnet/r/checkpoints/step-000000004/{file} is damaged" in said
    assert "resumed from runs/effnet/r/checkpoints/step-000000003, epoch 1" in said
    same_end(run, reference(2, BY_HOROVOD))


@pytest.mark.slow
def test_a_run_whose_checkpoints_are_all_damaged_is_refused(half, tmp_path):
    run = half.copied(tmp_path, ranks=1)
    for name in run.checkpoints:
        damage(run, name)
    before = files_under(run.path)
    line = refusal(run.finish(status=2))
    require_facts(line, "runs/effnet/r: ... step-000000004 ... damaged ... another --run")
    assert files_under(run.path) == before


@pytest.mark.slow
def test_never_begins_anew(half, tmp_path, reference):
    run = half.copied(tmp_path)
    run.finish("--resume", "never")
    same_end(run, reference(2, BY_HOROVOD))
    assert run.result["resumed"] == 0


@pytest.mark.slow
def test_a_second_run_in_one_folder_is_refused_and_the_first_untouched(half, tmp_path):
    run = half.copied(tmp_path)
    with run.hanging("step9", saved=8):
        wait_until(lambda: len(list((run.path / "checkpoints").glob("step-*"))) == 2, TIMEOUT_S)  # older ones go
        before = files_under(run.path)
        line = refusal(replace(run, ranks=1).finish(status=2))
        require_facts(line, "runs/effnet/r: ... in use, by process ")
        assert files_under(run.path) == before
