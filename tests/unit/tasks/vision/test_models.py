import copy
import socket
from urllib.error import URLError

import pytest
import torch
import torchvision
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.tasks.vision import models
from hvdtrain.tasks.vision.settings import MODELS, TINY
from tests import refusals


def tiny(*, seed=0, **options):
    torch.manual_seed(seed)
    return models.build(TINY, **{"classes": 10, **options})


@pytest.mark.parametrize(
    "name",
    [name if name in {TINY, "efficientnet_b0"} else pytest.param(name, marks=pytest.mark.slow) for name in MODELS],
)
def test_every_model_has_a_logit_per_class(name):
    with torch.device("meta"):
        logits = models.build(name, classes=10).eval()(torch.empty(2, 3, 64, 64))
    assert logits.shape == (2, 10)


def test_no_activation_copies_its_input_and_the_bits_stay():
    class Clones(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.count += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    def train(model):
        torch.manual_seed(1)
        images = torch.rand(4, 3, 32, 32)
        with Clones() as clones:
            logits = model.train()(images)
        logits.square().sum().backward()
        return logits, [parameter.grad for parameter in model.parameters()], clones.count

    model = tiny()
    theirs = copy.deepcopy(model)
    for module in theirs.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = True
    logits, gradients, copies = train(model)
    their_logits, their_gradients, their_copies = train(theirs)
    assert (copies, their_copies > 0) == (0, True)
    assert torch.equal(logits, their_logits)
    assert all(torch.equal(*pair) for pair in zip(gradients, their_gradients, strict=True))
    assert model.state_dict().keys() == theirs.state_dict().keys()


@pytest.mark.parametrize(
    ("name", "resize", "crop", "mean"),
    [
        (TINY, 32, 32, 0.485),
        ("efficientnet_b0", 256, 224, 0.485),
        ("efficientnet_b7", 600, 600, 0.485),
        ("efficientnet_v2_l", 480, 480, 0.5),
    ],
)
def test_preprocessing_is_the_one_the_model_was_evaluated_with(name, resize, crop, mean):
    found = models.preprocessing(name)
    assert (found.resize, found.crop, found.mean[0]) == (resize, crop, mean)


@pytest.mark.parametrize("name", [TINY, "efficientnet_b0"])
def test_stem_stride_1_doubles_the_resolution_after_the_stem_and_at_the_end(name):
    with torch.device("meta"):
        images = torch.empty(1, 3, 64, 64)
        halved, kept = (models.build(name, classes=10, stem_stride=stride).eval() for stride in (2, 1))
        for layers in (slice(1), slice(None)):
            small, large = (model.features[layers](images).shape[2:] for model in (halved, kept))
            assert [2 * side for side in small] == list(large)
        assert kept.features[0](images).shape[2:] == (64, 64)


def test_dropout_and_stochastic_depth_keep_the_models_own_when_not_given():
    with torch.device("meta"):
        ours, theirs = models.build("efficientnet_b3", classes=10), torchvision.models.efficientnet_b3()
        changed = models.build("efficientnet_b3", classes=10, dropout=0.7, stochastic_depth=0.6)

    def probabilities(model):
        depth = [layer.p for layer in model.modules() if type(layer).__name__ == "StochasticDepth"]
        return model.classifier[0].p, max(depth)

    assert probabilities(ours) == probabilities(theirs)
    assert probabilities(changed) == (0.7, pytest.approx(0.6, rel=0.1))  # at the last block: (blocks - 1) / blocks


def saved(folder, state):
    path = folder / "weights.pt"
    torch.save(state, path)
    return str(path)


def load(model, source, name=TINY):
    models.load_weights(model, models.pretrained_weights(name, source), source)


def test_head_for_other_classes_is_dropped_and_the_rest_loaded(tmp_path):
    source, model = tiny(seed=1, classes=1000), tiny(seed=2)
    load(model, saved(tmp_path, source.state_dict()))
    fresh = tiny(seed=2).state_dict()
    for name, value in model.state_dict().items():
        expected = fresh if name.startswith("classifier.1.") else source.state_dict()
        assert torch.equal(value, expected[name]), name
    built = tiny(seed=2, pretrained=saved(tmp_path, source.state_dict())).state_dict()
    assert all(torch.equal(value, built[name]) for name, value in model.state_dict().items())


def refused(model, source):
    return refusals.refused(lambda: load(model, source), f"--pretrained {source}: ")


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {name: value for name, value in state.items() if "running_mean" not in name},
        lambda state: {**state, "features.9.weight": torch.zeros(2)},
        lambda state: {**state, "features.0.0.weight": torch.zeros(16, 3, 5, 5)},
        lambda _: {},
    ],
    ids=["incomplete", "one more", "other shape", "empty"],
)
def test_weights_of_another_model_are_refused(tmp_path, change):
    assert "weights of another model" in refused(tiny(), saved(tmp_path, change(tiny().state_dict())))


def test_missing_file_is_refused(tmp_path):
    assert "no such file" in refused(tiny(), str(tmp_path / "none.pt"))


@pytest.mark.parametrize("value", [{"epoch": 3}, {0: torch.ones(1)}, torch.ones(1)])
def test_file_that_is_no_state_dict_is_refused(tmp_path, value):
    assert "not a state dict" in refused(tiny(), saved(tmp_path, value))


def test_unreachable_hub_names_the_url_and_the_way_out(monkeypatch):
    def offline(*_, **__):
        raise URLError(f"no route to host for {socket.getdefaulttimeout()} seconds")

    monkeypatch.setattr("torch.hub.load_state_dict_from_url", offline)
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", offline)
    begins = "--pretrained hub: cannot download https://download.pytorch.org/models/efficientnet_b0"
    line = refusals.refused(lambda: models.pretrained_weights("efficientnet_b0", "hub"), begins)
    refusals.require_facts(line, "no route to host for 15.0 seconds ... pass the file")
    assert socket.getdefaulttimeout() is None  # as before


def test_hub_has_no_tiny():
    line = refusals.refused(lambda: models.pretrained_weights(TINY, "hub"))
    assert "torchvision has no weights for efficientnet_tiny" in line


def test_hub_weights_are_checked_and_returned(monkeypatch):
    request = {}

    def fetched(url, **options):
        request.update(options, url=url)
        return {"weight": torch.ones(1)}

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fetched)
    assert models.pretrained_weights("efficientnet_b1", "hub") == {"weight": torch.ones(1)}
    assert "efficientnet_b1" in request["url"]
    assert request["check_hash"] is True
    assert request["weights_only"] is True
