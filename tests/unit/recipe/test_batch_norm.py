import copy

import pytest
import torch
from torch import nn

from hvdtrain.core.model.batch_norm import layers
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe.sync_batch_norm import SyncBatchNorm2d, convert
from tests.ranks import Rank, together
from tests.unit.core.test_step import tiny

CLOSE = {"rtol": 1e-4, "atol": 1e-5}
CHANNELS = 3


def plain(**options):
    """A batch norm that has seen something already."""
    generator = torch.Generator().manual_seed(1)
    layer = nn.BatchNorm2d(CHANNELS, **options)
    with torch.no_grad():
        for one in (layer.weight, layer.bias, layer.running_mean):
            one.copy_(torch.randn(CHANNELS, generator=generator))
        layer.running_var.copy_(torch.rand(CHANNELS, generator=generator) + 0.5)
    return layer


def features(count, *, seed=0, side=5):
    generator = torch.Generator().manual_seed(seed)
    scale, shift = torch.tensor([1.0, 5.0, 0.1])[:, None, None], torch.tensor([0.0, 3.0, -20.0])[:, None, None]
    return torch.randn(count, CHANNELS, side, side, generator=generator) * scale + shift


def pull(values):
    """A loss whose gradient differs between all elements."""
    generator = torch.Generator().manual_seed(9)
    return (values * torch.randn(values.shape, generator=generator).to(values.dtype)).sum()


def assert_same(one, other):
    torch.testing.assert_close(one, other, **CLOSE)


def test_under_bf16_autocast_it_keeps_the_type_and_computes_in_float32():
    torch.manual_seed(0)
    theirs = nn.Sequential(nn.Conv2d(CHANNELS, CHANNELS, 3), plain())
    ours = copy.deepcopy(theirs)
    convert(ours, SerialComm())
    found = []
    for net in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            out = net(features(4))
        pull(out).backward()
        found.append([out.float(), *(one.grad for one in net.parameters()), net[1].running_mean, net[1].running_var])
        assert out.dtype == torch.bfloat16
        assert net[1].weight.grad.dtype == net[1].running_mean.dtype == torch.float32
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05 * other.abs().max().item())
    assert_same(ours[1].running_mean, theirs[1].running_mean)
    assert_same(ours[1].running_var, theirs[1].running_var)


def test_single_values_per_channel_have_no_deviation_and_leave_finite_statistics():
    layer = SyncBatchNorm2d(plain(), SerialComm(), "bn")
    assert_same(layer(features(1, side=1))[0, :, 0, 0], layer.bias)
    assert torch.isfinite(layer.running_var).all()


def whole_and_shared(images, sizes, *, dtype=torch.float32):
    """What batch norm makes of all images, in float64, and what ranks make of parts of so many, in `dtype`.

    Each the output, the gradients of the images, of weight and of bias, and the running statistics of every rank.
    """
    pulls = torch.randn(images.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)

    def results(layer, part, pull):
        part.requires_grad_()
        out = layer(part)
        assert out.shape == part.shape
        (out * pull).sum().backward()
        assert layer.num_batches_tracked == 1
        return [out.detach(), part.grad, layer.weight.grad, layer.bias.grad, layer.running_mean, layer.running_var]

    whole = results(plain().double(), images.double(), pulls)

    def on(rank):
        part, pull = (both.to(dtype).split(sizes)[rank.rank].clone() for both in (images, pulls))
        return results(SyncBatchNorm2d(plain().to(dtype), rank, "bn"), part, pull)

    outs, of_images, of_weight, of_bias, means, variances = zip(*together(len(sizes), on), strict=True)
    assert all(torch.equal(one, means[0]) for one in means)
    assert all(torch.equal(one, variances[0]) for one in variances)
    return whole, [torch.cat(outs), torch.cat(of_images), sum(of_weight), sum(of_bias), means[0], variances[0]]


@pytest.mark.parametrize("sizes", [(6,), (1, 5), (2, 0, 3, 1)])
def test_in_float64_nothing_but_rounding_is_lost(sizes):
    for one, other in zip(*whole_and_shared(features(6), sizes, dtype=torch.float64), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("sizes", "mean"), [((6,), 1e6), ((2, 0, 3, 1), 1e4)])
def test_a_mean_far_from_zero_does_not_drown_the_deviation(sizes, mean):
    """Of squares in float32, 1e8 for 1e4, a variance of 1 is less than the last bit."""
    images = torch.randn(6, CHANNELS, 5, 5, generator=torch.Generator().manual_seed(2)) + mean
    images[2:] += 1.0  # the ranks' means differ
    whole, shared = whole_and_shared(images, sizes)
    rounding = mean * 2**-22  # of float32 around this mean
    for one, other in zip(whole[:4], shared[:4], strict=True):
        torch.testing.assert_close(one.float(), other, rtol=0, atol=rounding * max(1, one.abs().max().item()))
    torch.testing.assert_close(whole[4].float(), shared[4], rtol=2**-22, atol=0)
    torch.testing.assert_close(whole[5].float(), shared[5], rtol=max(1e-5, rounding), atol=0)


def test_a_step_asks_the_ranks_twice_for_each_layer_by_names_that_stay():
    comm = Rank()
    model = tiny()
    convert(model, comm)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    first, count = list(comm.names), len(layers(model))
    forward = [f"sync_bn.{name}.forward" for name, layer in model.named_modules() if layer in layers(model)]
    assert first[:count] == forward
    assert sorted(first[count:]) == sorted(name.replace("forward", "backward") for name in forward)
    model(torch.randn(2, 3, 32, 32)).sum().backward()
    assert comm.names == 2 * first
    model.eval()(torch.randn(2, 3, 32, 32))
    assert comm.names == 2 * first  # an evaluation says nothing


def test_a_deep_copy_shares_nothing_but_the_ranks():
    comm = Rank()
    layer = SyncBatchNorm2d(plain(momentum=0.3, eps=0.01), comm, "bn").eval()
    before = copy.deepcopy(layer.state_dict())
    twin = copy.deepcopy(layer)
    assert (type(twin), twin.training, twin.eps, twin.momentum) == (SyncBatchNorm2d, False, 0.01, 0.3)
    assert all(torch.equal(value, before[name]) for name, value in twin.state_dict().items())
    twin.train()(features(2, seed=4))
    assert comm.names == ["bn.forward"]
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())
