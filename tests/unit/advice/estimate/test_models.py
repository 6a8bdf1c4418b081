"""What launch knows of hvdtrain and of models without importing them, against both."""

import pytest
import torch
import torchvision

from hvdtrain.ranks.buckets import FIRST_BUCKET_MB
from hvdtrain.ranks.comm import BUCKET_MB
from hvdtrain.tasks.text.model import BertForMaskedLM, sizes_of
from launch.advice.estimate.inputs import MODELS
from launch.advice.estimate.step import BUCKET_BYTES, FIRST_BUCKET_BYTES

FEW = ("efficientnet_b0", "bert_base")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in MODELS]
)
def test_parameters_are_those_of_the_model(name):
    with torch.device("meta"):
        if name.startswith("bert"):
            model = BertForMaskedLM(sizes_of(name, vocabulary=30_522))
        else:
            options = {"init_weights": False} if name == "inception_v3" else {}
            model = getattr(torchvision.models, name)(**options)
    assert sum(map(torch.numel, model.parameters())) == MODELS[name]


def test_buckets_are_those_of_hvdtrain():
    assert (BUCKET_BYTES, FIRST_BUCKET_BYTES) == (BUCKET_MB * 2**20, FIRST_BUCKET_MB * 2**20)
