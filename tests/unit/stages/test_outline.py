import copy
import random

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import BadInput
from hvdtrain.stages.outline import Outline, outline_on_all
from hvdtrain.vision import models
from tests.ranks import Rank

ALONE = SerialComm()


class Odd(nn.Sequential):
    """Weights that are computed, cloned, tied, drawn in strides, read from a file, and no parameters at all."""

    def __init__(self, file):
        layer = nn.Linear(5, 5)
        with torch.no_grad():
            layer.weight[::2].uniform_()
        super().__init__(layer, copy.deepcopy(layer), nn.Linear(5, 40), nn.Linear(40, 5), nn.Linear(5, 40))
        self[1].scale = nn.Parameter(torch.randn(3, 7) * 0.5)
        self[2].register_buffer("table", torch.arange(8).float().outer(torch.ones(5)), persistent=False)
        self[4].weight = self[2].weight
        self.plain = torch.rand(3)
        self[3].load_state_dict(torch.load(file, weights_only=True, mmap=True))


def effnet():
    return models.build("efficientnet_tiny", classes=10)


def seeded(make):
    def make_seeded():
        torch.manual_seed(3)
        return make()

    return make_seeded


def tensors(model):
    return {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}


def test_weights_that_come_about_in_other_ways(tmp_path):
    torch.save(nn.Linear(40, 5).state_dict(), tmp_path / "weights.pt")
    make = seeded(lambda: Odd(tmp_path / "weights.pt"))
    whole, outline = make(), outline_on_all(ALONE, make)
    assert outline.model[0].weight.is_meta
    for kept in range(5):
        part = copy.deepcopy(outline.model)
        for number in {0, 1, 2, 3, 4} - {kept}:
            part[number] = nn.Identity()
        outline.fill_on_all(ALONE, part)
        assert torch.equal(part.plain, whole.plain)
        for name, tensor in tensors(part[kept]).items():
            assert torch.equal(tensor, tensors(whole[kept])[name])
        assert part[0].weight.is_meta == (kept not in (0, 1))  # the copy needs the values of the first


def test_other_random_numbers_are_drawn_as_if_there_had_been_no_outline():
    def make():
        model = nn.Linear(3, 3)
        model.drawn = random.random(), np.random.rand()  # noqa: NPY002, S311 (what a program may do)
        return model

    drawn = Outline(seeded(make)).model.drawn
    assert make().drawn == drawn
    assert make().drawn != drawn


class Reads(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.largest = self.weight.max().item()


class Swaps(nn.Linear):
    """Made in another way each time."""

    made = 0

    def __init__(self):
        Swaps.made += 1
        super().__init__(3, 3)
        if Swaps.made % 2:
            nn.init.zeros_(self.bias)


def test_a_model_that_reads_its_values_on_any_rank_is_made_whole():
    assert outline_on_all(ALONE, Reads) is None
    assert outline_on_all(Rank(0, 2, answers=lambda value: [value, False if value is True else value]), effnet) is None


def test_a_model_that_is_made_in_another_way_is_made_whole():
    outline = outline_on_all(ALONE, seeded(Swaps))
    part = copy.deepcopy(outline.model)
    outline.fill_on_all(ALONE, part)
    assert Swaps.made == 3
    assert not part.weight.is_meta


def test_bad_input_is_no_reason_to_try_again():
    def make():
        raise BadInput("no such file")

    with pytest.raises(BadInput, match="no such file"):
        outline_on_all(ALONE, make)
