"""A torch whose weights_only=True can be fooled loads no weights from files, and only this user's checkpoints."""

import os

import pytest
import torch

from hvdtrain.checkpoint.files import find_newest, load
from hvdtrain.settings.safety import unpickled
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision import models
from tests.unit.checkpoint.test_strangers import forged, saved


@pytest.mark.parametrize(("torch_version", "safe"), [("2.9.1+cu126", False), ("2.10.0", True)])
def test_from_2_10_on_it_is_safe(monkeypatch, torch_version, safe):
    monkeypatch.setattr(unpickled, "version", lambda _: torch_version)
    assert unpickled.is_load_safe() is safe


def test_weights_from_a_file(tmp_path, monkeypatch):
    file = tmp_path / "weights.pt"
    torch.save({"head.bias": torch.zeros(2)}, file)
    monkeypatch.setattr(unpickled, "version", lambda _: "2.11.0")
    assert list(models.pretrained_weights("efficientnet_tiny", str(file))) == ["head.bias"]
    monkeypatch.setattr(unpickled, "version", lambda _: "2.7.1")
    with pytest.raises(BadInput, match=r"torch 2\.7\.1 .* 'hub'"):
        models.pretrained_weights("efficientnet_tiny", str(file))


def test_pickled_weights_of_a_bert(tmp_path, monkeypatch):
    from hvdtrain.tasks.text.pretrained import Pretrained
    from hvdtrain.tasks.text.weights import _read_weights

    monkeypatch.setattr(unpickled, "version", lambda _: "2.7.1")
    torch.save({}, tmp_path / "pytorch_model.bin")
    pretrained = object.__new__(Pretrained)
    for name, value in {"folder": tmp_path, "source": "a/model"}.items():
        object.__setattr__(pretrained, name, value)
    with pytest.raises(BadInput, match=r"--pretrained a/model: .* model\.safetensors"):
        _read_weights(pretrained)


@pytest.mark.parametrize(
    ("torch_version", "user", "loaded"), [("2.7.1", 0, True), ("2.7.1", 1, False), ("2.11.0", 1, True)]
)
def test_a_checkpoint_of_another_user(tmp_path, monkeypatch, torch_version, user, loaded):
    forged(tmp_path, saved({"step": 7}))
    found, _ = find_newest(tmp_path)
    monkeypatch.setattr(unpickled, "version", lambda _: torch_version)
    own = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: own + user)
    if loaded:
        assert load(found, "state") == {"step": 7}
    else:
        with pytest.raises(BadInput, match=r"rejected \(another user's, and torch 2\.7\.1"):
            load(found, "state")
