"""Convolutions beside torch's, and squeeze-excitation beside torchvision's on 12 x 12 pixels."""

import copy

import pytest
import torch
import torchvision
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.tasks.vision import layers, models

TORCHVISIONS = torchvision.ops.SqueezeExcitation
FORMATS = [torch.contiguous_format, torch.channels_last]


class Written(TorchDispatchMode):
    """How often each pixel is written."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.count += not func.is_view and isinstance(result, torch.Tensor) and result.shape[2:] == (12, 12)
        return result


def trained(kind, dtype, *, memory_format=torch.channels_last, needs_gradient=True, compiled=False):
    """What goes back into features and weights, and from where."""
    torch.manual_seed(0)
    layer = TORCHVISIONS(16, 4, activation=torch.nn.SiLU).to(dtype)
    layer.__class__ = kind
    features, gradient = (torch.randn(8, 16, 12, 12, dtype=dtype).to(memory_format=memory_format) for _ in range(2))
    features.requires_grad_(needs_gradient)
    run = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    output = run(features)
    with Written() as written:
        output.backward(gradient)
    return output, features.grad, [one.grad for one in layer.parameters()], written.count


@pytest.mark.parametrize("memory_format", FORMATS, ids=str)
def test_gradients_are_torchvisions(memory_format):
    ours, theirs = (
        trained(kind, torch.float64, memory_format=memory_format) for kind in (layers.SqueezeExcitation, TORCHVISIONS)
    )
    assert torch.equal(ours[0], theirs[0])
    torch.testing.assert_close(ours[1], theirs[1], rtol=0, atol=1e-12)
    assert ours[1].stride() == theirs[1].stride()
    assert all(torch.equal(*pair) for pair in zip(ours[2], theirs[2], strict=True))
    assert (ours[3], theirs[3]) == (2, 4)


def test_features_may_need_no_gradient():
    ours, theirs = (
        trained(kind, torch.float32, needs_gradient=False) for kind in (layers.SqueezeExcitation, TORCHVISIONS)
    )
    assert ours[1] is None
    assert all(torch.equal(*pair) for pair in zip(ours[2], theirs[2], strict=True))


def convolved(layer, images, *, autocast=False):
    """Output and gradients of a convolution, and what autograd calls to go back."""
    images = images.clone().requires_grad_()
    with torch.autocast("cpu", enabled=autocast):
        output = layer(images)
    output.float().sin().sum().backward()
    return output, images.grad, [one.grad for one in layer.parameters()], type(output.grad_fn).__name__


DEPTHWISE = [(5, 1, 8), (5, 2, 7), (5, 2, 8), (3, 1, 2), (3, 2, 3)]  # kernel, stride, side
ORDINARY = [(3, 1, 8), (3, 2, 8), (3, 2, 4), (5, 2, 2), (5, 1, 1), (3, 1, 1)]  # where oneDNN is fast, or faster


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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's compiler does it
def test_compiled_it_is_one_graph_with_the_same_gradients():
    whole, compiled = (trained(layers.SqueezeExcitation, torch.float64, compiled=one) for one in (False, True))
    torch.testing.assert_close(compiled[1], whole[1], rtol=0, atol=1e-12)
    torch.testing.assert_close(compiled[2], whole[2], rtol=0, atol=1e-12)


def test_a_model_and_its_copy_have_no_other_and_torchvisions_names():
    with torch.device("meta"):
        model, theirs = models.build("efficientnet_b0", classes=10), torchvision.models.efficientnet_b0(num_classes=10)
    for one in (model, copy.deepcopy(model)):
        kinds = [type(module) for module in one.modules() if isinstance(module, TORCHVISIONS)]
        assert kinds == [layers.SqueezeExcitation] * 16
        kinds = [type(module) for module in one.modules() if isinstance(module, torch.nn.Conv2d)]
        assert kinds == [layers.Convolution] * 81
    assert model.state_dict().keys() == theirs.state_dict().keys()
