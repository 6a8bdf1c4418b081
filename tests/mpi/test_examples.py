"""The programs of examples/ as they stand: what they learn, and that they resume with the same bits."""

import os
import random

import pytest
import torch
from PIL import Image

from hvdtrain.tasks.vision.images import digits as known_digits
from tests import tutorial
from tests.mpi.conftest import EVERY_OPTION, PROJECT, end_well, launcher_of, left_in, program_of, start_in, wait_until
from tests.mpi.test_own_model import result, weights

EXAMPLES = PROJECT / "examples"
PICTURES = ("--weights", "none", "--size", "32", "--no-mirror", "--data-dir", "pictures")
GPT = ("--layers", "2", "--width", "16", "--context", "32")
SMALL = {  # by the name of the example: what makes it short
    "tabular": ("--batch-size-per-rank", "32"),
    "char_gpt": (*GPT, "--batch-size-per-rank", "512"),
    "finetune_torchvision": (*PICTURES, "--model", "mobilenet_v3_small", "--batch-size-per-rank", "16"),
}


def command(name, *words):
    return [str(EXAMPLES / f"{name}.py"), "--run", "r", *SMALL[name], *words]


def put_digits(folder):
    """60 written zeros and ones as pictures, every fifth of them to validate with."""
    pixels, labels = (known_digits().train.tensors[name].numpy() for name in ("images", "labels"))
    for number in [number for number, label in enumerate(labels) if label < 2][:60]:
        of_class = folder / "pictures" / ("train" if number % 5 else "val") / str(labels[number])
        of_class.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number, 0]).save(of_class / f"{number}.png")


@pytest.fixture
def one_core():
    """Ranks have one core each, and so one worker that imports the program again, which takes seconds."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice([*cores])})  # noqa: S311 (no secret)
    yield
    os.sched_setaffinity(0, cores)


# --- one short training each


def test_a_table_is_learned(tmp_path):
    """By itself: a worker would import torch."""
    program = program_of(tmp_path, EVERY_OPTION + (EXAMPLES / "tabular.py").read_text())
    end_well(tmp_path, "python", 1, [program, *command("tabular", "--epochs", "8", "--workers", "0")[1:]])
    assert result(tmp_path, "planted")["eval_accuracy"] > 0.9
    assert result(tmp_path, "planted")["eval_error"] < 0.6  # of the variance, which is 1


def test_a_small_gpt_learns_to_write(tmp_path):
    words = ("--stages", "2", "--accumulate-steps", "2", "--batch-size-per-rank", "128")
    said = end_well(tmp_path, "mpirun", 2, command("char_gpt", "--epochs", "1", *words))
    assert result(tmp_path, "char_gpt")["eval_bits"] < 4.5  # by the characters' frequencies alone: 4.7
    written = said.partition("finished: ")[2].partition("\n")[2]
    assert len(written.strip("\n")) > 250


@pytest.mark.slow
def test_pictures_are_learned_and_the_weights_are_saved(tmp_path, one_core):
    put_digits(tmp_path)
    words = ("--epochs", "1", "--model", "squeezenet1_1")
    end_well(tmp_path, "python", 1, command("finetune_torchvision", *words))
    wait_until(lambda: not left_in(tmp_path), 5)
    assert result(tmp_path, "finetune_torchvision")["exit_reason"] == "finished"
    assert torch.load(tmp_path / "model.pt")["classifier.1.weight"].shape == (2, 512, 1, 1)


# --- more of the same


@pytest.mark.slow
def test_a_killed_example_ends_with_the_weights_of_an_unbroken_one(tmp_path):
    words = command("char_gpt", "--epochs", "1", "--deterministic", "--checkpoint-every", "1steps")
    unbroken, killed = (tmp_path / state for state in ("unbroken", "killed"))
    unbroken.mkdir()
    killed.mkdir()
    end_well(unbroken, "mpirun", 2, words)
    assert start_in(killed, "mpirun", 2, words, HVDTRAIN_FAULT="kill@rank0:step7").returncode != 0
    assert "resumed from runs/char_gpt/r/checkpoints/step-" in end_well(killed, "mpirun", 2, words)
    assert weights(killed, 2, "char_gpt") == weights(unbroken, 2, "char_gpt")


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_each_program_of_the_tutorial_trains(tmp_path, number, ranks):
    program = program_of(tmp_path, EVERY_OPTION + tutorial.programs()[number])
    words = [program, "--run", "r", "--epochs", "1", "--batch-size-per-rank", "32", "--workers", "0"]
    assert "finished: test " in end_well(tmp_path, launcher_of(ranks), ranks, words)
    assert result(tmp_path, "planted")["exit_reason"] == "finished"
