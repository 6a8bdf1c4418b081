"""The programs of examples/ as they stand: what they learn, and that they resume with the same bits."""

import os
import random

import pytest
import torch
from PIL import Image

from hvdtrain.vision.images import digits as known_digits
from tests import tutorial
from tests.mpi.conftest import PROJECT, end_well, launcher_of, left_in, start_in, wait_until
from tests.mpi.interrupted import refusal
from tests.mpi.test_own_model import result, weights

EXAMPLES = PROJECT / "examples"
PICTURES = (
    "--weights",
    "none",
    "--size",
    "32",
    "--model",
    "mobilenet_v3_small",
    "--no-mirror",
    "--data-dir",
    "pictures",
)
GPT = ("--layers", "2", "--width", "16", "--context", "32")
STEADY = ("--deterministic", "--checkpoint-every-steps", "1")
SMALL = {  # by the name of the example: what makes it short
    "tabular": ("--batch-size-per-rank", "32"),
    "char_gpt": (*GPT, "--batch-size-per-rank", "512"),
    "finetune_torchvision": (*PICTURES, "--batch-size-per-rank", "16"),
}


def command(name, *words):
    return [str(EXAMPLES / f"{name}.py"), "--run", "r", *SMALL[name], *words]


def put_digits(folder, digits=range(10), most=10_000):
    """Written digits as pictures, every fifth of them to validate with; their folder."""
    pixels, labels = (known_digits().train.tensors[name].numpy() for name in ("images", "labels"))
    for number in [number for number, label in enumerate(labels) if label in digits][:most]:
        of_class = folder / "pictures" / ("train" if number % 5 else "val") / str(labels[number])
        of_class.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels[number, 0]).save(of_class / f"{number}.png")
    return folder


@pytest.fixture
def one_core():
    """Ranks have one core each, and so one worker that imports the program again, which takes seconds."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {random.choice([*cores])})  # noqa: S311 (no secret)
    yield
    os.sched_setaffinity(0, cores)


# --- one short training each


def test_a_table_is_learned(tmp_path, one_core):
    end_well(tmp_path, "python", 1, command("tabular", "--epochs", "8"))
    wait_until(lambda: not left_in(tmp_path), 5)
    assert result(tmp_path, "tabular")["eval_accuracy"] > 0.9
    assert result(tmp_path, "tabular")["eval_error"] < 0.6  # of the variance, which is 1


def test_a_small_gpt_learns_to_write(tmp_path):
    words = ("--stages", "2", "--accumulate-steps", "2", "--batch-size-per-rank", "64")
    said = end_well(tmp_path, "mpirun", 2, command("char_gpt", "--epochs", "1", *words))
    assert result(tmp_path, "char_gpt")["eval_bits"] < 4.5  # by the characters' frequencies alone: 4.7
    written = said.partition("finished: ")[2].partition("\n")[2]
    assert len(written.strip("\n")) > 250


def test_pictures_are_learned_and_the_weights_are_saved(tmp_path, one_core):
    put_digits(tmp_path, digits=(0, 1), most=60)
    words = ("--epochs", "1", "--model", "squeezenet1_1")
    end_well(tmp_path, "python", 1, command("finetune_torchvision", *words))
    assert result(tmp_path, "finetune_torchvision")["exit_reason"] == "finished"
    assert torch.load(tmp_path / "model.pt")["classifier.1.weight"].shape == (2, 512, 1, 1)


# --- more of the same


@pytest.fixture(scope="module")
def pictures(tmp_path_factory):
    return put_digits(tmp_path_factory.mktemp("pictures"), digits=(0, 1), most=160) / "pictures"


@pytest.mark.slow
@pytest.mark.usefixtures("one_core")
@pytest.mark.parametrize(("name", "step"), [("char_gpt", 7), ("finetune_torchvision", 3)])
def test_a_killed_example_ends_with_the_weights_of_an_unbroken_one(tmp_path, pictures, name, step):
    words = command(name, "--epochs", "2", *STEADY)
    if name == "finetune_torchvision":
        words += ["--data-dir", str(pictures), "--mirror"]
    folders = {state: tmp_path / state for state in ("unbroken", "killed")}
    for folder in folders.values():
        folder.mkdir()
    end_well(folders["unbroken"], "mpirun", 2, words)
    killed = start_in(folders["killed"], "mpirun", 2, words, HVDTRAIN_FAULT=f"kill@rank0:step{step}")
    assert killed.returncode != 0
    said = end_well(folders["killed"], "mpirun", 2, words)
    assert f"resumed from runs/{name}/r/checkpoints/step-" in said
    assert weights(folders["killed"], 2, name) == weights(folders["unbroken"], 2, name)


@pytest.mark.slow
def test_two_ranks_learn_what_one_process_learns(tmp_path):
    """With the same batches; hidden values are keyed by sample, so that the ranks hide the same ones."""
    of_ranks = {}
    for ranks in (1, 2):
        folder = tmp_path / str(ranks)
        folder.mkdir()
        words = [str(EXAMPLES / "tabular.py"), "--run", "r", "--epochs", "3", "--global-batch-size", "32"]
        end_well(folder, launcher_of(ranks), ranks, words)
        of_ranks[ranks] = result(folder, "tabular")
    assert of_ranks[1]["eval_loss"] == pytest.approx(of_ranks[2]["eval_loss"], rel=1e-4)


@pytest.mark.slow
def test_the_last_layer_learns_new_classes_on_weights_of_others(tmp_path):
    first, second = (tmp_path / name for name in ("first", "second"))
    put_digits(first, digits=range(5), most=200)
    put_digits(second, digits=range(5, 10), most=200)
    model = ("--model", "resnet18", "--batch-size-per-rank", "32")
    end_well(first, "mpirun", 2, command("finetune_torchvision", *model, "--epochs", "2"))
    before = first / "model.pt"
    words = ("--epochs", "4", "--weights", str(before), "--freeze")
    end_well(second, "mpirun", 2, command("finetune_torchvision", *model, *words))
    assert result(second, "finetune_torchvision")["eval_accuracy"] > 0.6  # a guess is right in 0.2
    old, new = torch.load(before), torch.load(second / "model.pt")
    kernels = [name for name in old if old[name].ndim == 4]
    assert len(kernels) == 20
    assert all(torch.equal(old[name], new[name]) for name in kernels)
    assert not torch.equal(old["fc.weight"], new["fc.weight"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--data-dir", "missing"), "No such file or directory: 'missing/train'"),
        (("--weights", "other.pt"), "Error(s) in loading state_dict for MobileNetV3"),
    ],
)
def test_what_cannot_be_tuned_is_refused_in_one_line(tmp_path, words, line):
    put_digits(tmp_path, digits=(0, 1), most=40)
    torch.save({"fc.weight": torch.zeros(1)}, tmp_path / "other.pt")
    done = start_in(tmp_path, "mpirun", 2, command("finetune_torchvision", *words))
    assert done.returncode == 2
    assert line in refusal(done.stderr)
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("number", "ranks"), [(1, 2), (2, 1), (3, 2)])
def test_each_program_of_the_tutorial_trains(tmp_path, one_core, number, ranks):
    program = tmp_path / "programs" / "mine.py"  # where ranks are forks
    program.parent.mkdir()
    program.write_text(tutorial.programs()[number])
    words = [str(program), "--run", "r", "--epochs", "1", "--batch-size-per-rank", "32"]
    said = end_well(tmp_path, launcher_of(ranks), ranks, words)
    assert "finished: test " in said
    assert result(tmp_path, "mine")["exit_reason"] == "finished"
