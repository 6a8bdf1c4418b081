"""Convolutions beside torch's."""

import copy

import pytest
import torch
import torchvision

from hvdtrain.vision import layers, models

FORMATS = [torch.contiguous_format, torch.channels_last]


def convolved(layer, images, *, autocast=False):
    """Output and gradients of a convolution, and what autograd calls to go back."""
    images = images.clone().requires_grad_()
    with torch.autocast("cpu", enabled=autocast):
        output = layer(images)
    output.float().sin().sum().backward()
    return output, images.grad, [one.grad for one in layer.parameters()], type(output.grad_fn).__name__


DEPTHWISE = [(5, 1, 8), (5, 2, 7), (5, 2, 8), (3, 1, 2), (3, 2, 3)]  # kernel, stride, side
ORDINARY = [(3, 1, 8), (3, 2, 8)]  # where oneDNN is fast


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
@pytest.mark.parametrize(("kernel", "stride", "side"), [*DEPTHWISE, *ORDINARY, (1, 1, 4)])
def test_convolutions_have_torchs_outputs_and_gradients(kernel, stride, side, memory_format):
    torch.manual_seed(0)
    outputs = 24 if kernel == 1 else 16
    theirs = torch.nn.Conv2d(
        16, outputs, kernel, stride, kernel // 2, groups=1 if kernel == 1 else 16, bias=kernel == 1
    ).to(memory_format=memory_format)
    ours = copy.deepcopy(theirs)
    layers.convert(ours)
    images = torch.randn(3, 16, side, side).to(memory_format=memory_format)
    (*expected, _), (*found, called) = convolved(theirs, images), convolved(ours, images)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert found[0].is_contiguous(memory_format=memory_format)
    assert (called == "_DepthwiseBackward") == ((kernel, stride, side) in DEPTHWISE)
    assert ours(images[:0]).shape == theirs(images[:0]).shape
    if kernel > 1:
        assert convolved(ours, images, autocast=True)[3] == "ConvolutionBackward0"
        assert convolved(ours.double(), images.double())[3] == "ConvolutionBackward0"


def test_a_model_and_its_copy_have_no_other_and_torchvisions_names():
    with torch.device("meta"):
        model, theirs = models.build("efficientnet_b0", classes=10), torchvision.models.efficientnet_b0(num_classes=10)
    for one in (model, copy.deepcopy(model)):
        kinds = [type(module) for module in one.modules() if isinstance(module, torch.nn.Conv2d)]
        assert kinds == [layers.Convolution] * 81
    assert model.state_dict().keys() == theirs.state_dict().keys()
