import copy

import pytest
import torch

from hvdtrain.stages.cut import Passage
from hvdtrain.stages.stage import Stage

from .test_blocks import MODELS

PASSAGE = Passage(time_ms=1.0, trailing_shape=(), dtype=torch.float32, memory_format=torch.contiguous_format)


@pytest.mark.parametrize(
    ("kind", "cut", "precision"),
    [("effnet", 2, torch.float32), ("effnet", 1, torch.bfloat16), ("classify", 2, torch.bfloat16)],
)
def test_a_cut_changes_no_bit_of_a_gradient(kind, cut, precision):
    model, blocks, inputs = MODELS[kind]()
    parts = [copy.deepcopy(model) for _ in range(2)]

    def stage(number, starts, received=None):
        part = Stage(blocks=blocks, starts=starts, passages=(PASSAGE,) * len(blocks), index=number, pipeline=None)
        with torch.autocast("cpu", precision, enabled=precision != torch.float32):
            return part.run(parts[number] if len(starts) > 1 else model, received, inputs)

    stage(0, (0,)).square().sum().backward()
    sent = stage(0, (0, cut))
    received = sent.detach().requires_grad_()  # as it comes from another rank
    stage(1, (0, cut), received).square().sum().backward()
    sent.backward(received.grad)
    for name, parameter in model.named_parameters():
        [gradient] = [grad for part in parts if (grad := part.get_parameter(name).grad) is not None]
        assert torch.equal(gradient, parameter.grad)
