"""The programs of examples/ in this process: what each must hold for any choice of its reader."""

import json
import runpy
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from threading import Event

import pytest
import torch
from PIL import Image
from torchvision.models import get_model

from hvdtrain.program.run import Run
from hvdtrain.ranks.comm import SerialComm

EXAMPLES = Path(__file__).parents[2] / "examples"
CLASSES = 3
MODELS = ("resnet18", "squeezenet1_1", "vit_b_32")  # each names its head in another way


@pytest.fixture(scope="module")
def finetune():
    return runpy.run_path(str(EXAMPLES / "finetune_torchvision.py"))


@pytest.fixture(scope="module")
def settings(finetune, tmp_path_factory):
    folder = tmp_path_factory.mktemp("pictures")
    for split in ("train", "val"):
        for label in range(CLASSES):
            (folder / split / str(label)).mkdir(parents=True)
            Image.new("L", (8, 8)).save(folder / split / str(label) / "one.png")
    return finetune["Settings"](data_dir=folder, weights="none", freeze=True)


def following_the_classes(name):
    """The tensors of a model whose shape follows the number of classes."""
    states = [get_model(name, num_classes=classes).state_dict() for classes in (CLASSES, CLASSES + 1)]
    return {key for key in states[0] if states[0][key].shape != states[1][key].shape}


@pytest.mark.parametrize("name", MODELS)
def test_the_head_of_each_family_is_what_a_frozen_model_trains(finetune, settings, name):
    with torch.device("meta"):
        model, _, _ = finetune["begin"](replace(settings, model=name))
        assert {key for key, one in model.named_parameters() if one.requires_grad} == following_the_classes(name)


def test_weights_for_other_classes_are_taken_but_for_the_head(finetune, settings, tmp_path):
    other = get_model("squeezenet1_1", num_classes=7).state_dict()
    torch.save(other, tmp_path / "other.pt")
    chosen = replace(settings, model="squeezenet1_1", weights=str(tmp_path / "other.pt"))
    state = finetune["begin"](chosen)[0].state_dict()
    assert state["classifier.1.weight"].shape == (CLASSES, 512, 1, 1)
    assert all(torch.equal(state[key], other[key]) for key in state if not key.startswith("classifier"))


def test_noise_is_of_the_seed_the_epoch_and_the_sample(finetune, settings):
    pictures = finetune["Pictures"](replace(settings, seed=3))
    raw = {"inputs": torch.arange(64.0).repeat(50, 1).view(50, 1, 8, 8), "targets": torch.zeros(50)}
    samples = torch.arange(50)
    first, second = (pictures.prepare(raw, samples, epoch)["inputs"] for epoch in (0, 1))
    mirrored = (first != raw["inputs"]).flatten(1).any(1)
    assert 10 < mirrored.sum() < 40
    assert torch.equal(first[mirrored], raw["inputs"][mirrored].flip(3))
    assert not torch.equal(first, second)
    part = {name: tensor[7:9] for name, tensor in raw.items()}
    assert torch.equal(pictures.prepare(part, samples[7:9], 0)["inputs"], first[7:9])
    assert pictures.prepare(raw, samples, None) is raw
    nothing = {name: tensor[:0] for name, tensor in raw.items()}  # of a rank without samples of a small last batch
    assert pictures.prepare(nothing, samples[:0], 0)["inputs"].shape == (0, 1, 8, 8)


def test_values_are_hidden_by_seed_epoch_and_sample():
    tabular = runpy.run_path(str(EXAMPLES / "tabular.py"))
    task = tabular["Diagnosis"](tabular["Settings"](hide=0.5))
    raw, samples = {"values": torch.ones(40, 30), "label": torch.zeros(40, dtype=torch.long)}, torch.arange(40)
    seen = task.prepare(raw, samples, 0)["seen"]
    assert 0.4 < seen.mean() < 0.6
    assert raw["values"].all()
    assert torch.equal(task.prepare({"values": raw["values"][5:6]}, samples[5:6], 0)["seen"], seen[5:6])
    assert not torch.equal(task.prepare(raw, samples, 1)["seen"], seen)
    assert torch.equal(task.prepare(raw, samples, None)["seen"], raw["values"])
    nothing = task.prepare({name: tensor[:0] for name, tensor in raw.items()}, samples[:0], 0)
    assert task.loss(tabular["Model"](30, 4), nothing, training=True).loss == 0


def test_a_character_of_the_gpt_does_not_see_those_after_it():
    gpt = runpy.run_path(str(EXAMPLES / "char_gpt.py"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(gpt["Embedding"](10, 8, 32), gpt["Layer"](32), gpt["Layer"](32))
    text = torch.randint(10, (1, 8))
    changed = text.clone()
    changed[0, 5] = (text[0, 5] + 1) % 10
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert (before[:, 5:] != after[:, 5:]).flatten(2).any(2).all()


def test_the_patience_of_an_example_is_restored_and_its_metric_is_of_all_pixels(tmp_path, monkeypatch):
    monkeypatch.setattr("hvdtrain.settings.safety.exits.install_stop_handlers", lambda *_, **__: Event())
    example = runpy.run_path(str(EXAMPLES / "early_stopping.py"))
    settings = example["Settings"](
        runs_dir=tmp_path,
        experiment="e",
        run="r",
        epochs=12,
        patience=1,
        batch_size_per_rank=128,
        lr=0.4,
        hang_timeout_s=0.0,
    )
    with ExitStack() as stack:
        run = Run(SerialComm(), settings, stack)
        example["main"](run)
    result = json.loads((run.started.folder / "result.json").read_text())
    assert (result["exit_reason"], result["stopped"][:19]) == ("finished", "no better IoU than ")
    assert 1 < result["epochs"] < 12
    assert run.started.state["patience"] == (pytest.approx(result["best_iou"], abs=0.001), 1)
    assert result["eval_iou"] > 0.5
