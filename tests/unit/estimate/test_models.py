"""The table of models against the models themselves."""

import pytest
import torch
import torchvision

from hvdtrain.text.model import BertForMaskedLM, sizes_of
from launch.estimate.models import MODELS

FEW = ("efficientnet_b0", "bert_base")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_parameters_and_tensors_are_those_of_the_model(name):
    with torch.device("meta"):
        if name.startswith("bert"):
            model = BertForMaskedLM(sizes_of(name, vocabulary=30_522))
        else:
            options = {"init_weights": False} if name == "inception_v3" else {}
            model = getattr(torchvision.models, name)(**options)
    parameters = list(model.parameters())
    assert (sum(map(torch.numel, parameters)), len(parameters)) == MODELS[name]
