import copy

import pytest
import torch
from torch import nn

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.train.average import moving_average
from hvdtrain.train.batch_norm import SyncBatchNorm2d, convert, layers
from hvdtrain.vision import models
from tests.ranks import Rank

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


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("options", [{}, {"momentum": 0.3, "eps": 0.01}])
@pytest.mark.parametrize("training", [True, False])
def test_alone_it_is_batch_norm(training, options, memory_format):
    ours = SyncBatchNorm2d(plain(**options), SerialComm(), "bn").train(training)
    theirs = plain(**options).train(training).double()  # torch's own in float32 errs more than ours
    for number in range(3):
        found = []
        for layer in (ours, theirs):
            layer.zero_grad()
            images = features(4, seed=number).contiguous(memory_format=memory_format).to(layer.weight.dtype)
            out = layer(images.requires_grad_())
            pull(out).backward()
            assert out.is_contiguous(memory_format=memory_format)
            gradients = [images.grad, layer.weight.grad, layer.bias.grad]
            found.append([out, *gradients, layer.running_mean, layer.running_var])
            assert layer.num_batches_tracked == (number + 1 if training else 0)
        for one, other in zip(*found, strict=True):
            assert one.dtype == torch.float32
            assert_same(one, other.float())


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


def other_half(mine, theirs):
    """Adds what the other rank's images give, as part of the same graph."""

    def add(values, name):
        if name.endswith("mean"):
            count = torch.tensor([theirs.numel() / CHANNELS])
            return values + torch.cat([theirs.sum((0, 2, 3)), count])
        mean = torch.cat([mine, theirs]).mean((0, 2, 3))
        return values + (theirs - mean[:, None, None]).square().sum((0, 2, 3))

    return Rank(0, 2, differentiable=add)


@pytest.mark.parametrize("first", [0, 1, 3, 5, 6])
def test_two_ranks_are_the_whole_batch(first):
    whole, like = plain(), plain()
    images = features(6).requires_grad_()
    out = whole(images)
    pull(out).backward()

    parts = [part.detach().requires_grad_() for part in (images[:first], images[first:])]
    ranks = [SyncBatchNorm2d(like, other_half(mine, theirs), "bn") for mine, theirs in (parts, parts[::-1])]
    outs = [layer(part) for layer, part in zip(ranks, parts, strict=True)]
    assert [part.shape for part in outs] == [part.shape for part in parts]
    pull(torch.cat(outs)).backward()
    assert_same(torch.cat(outs), out)
    assert_same(torch.cat([part.grad for part in parts]), images.grad)
    assert_same(ranks[0].weight.grad + ranks[1].weight.grad, whole.weight.grad)
    assert_same(ranks[0].bias.grad + ranks[1].bias.grad, whole.bias.grad)
    for layer in ranks:
        assert_same(layer.running_mean, whole.running_mean)
        assert_same(layer.running_var, whole.running_var)
        assert layer.num_batches_tracked == 1


def tiny():
    torch.manual_seed(0)
    return models.build("efficientnet_tiny", classes=10, dropout=0.0)


def test_convert_replaces_every_batch_norm_and_keeps_the_state():
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    names = [name for name, layer in model.named_modules() if isinstance(layer, nn.BatchNorm2d)]
    convert(model, SerialComm())
    assert len(names) == len(layers(model)) > 10
    assert all(type(model.get_submodule(name)) is SyncBatchNorm2d for name in names)
    assert all(type(layer) is SyncBatchNorm2d for layer in layers(model))
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    settings = [(layer.eps, layer.momentum, layer.num_features) for layer in layers(model)]
    assert settings == [(layer.eps, layer.momentum, layer.num_features) for layer in layers(tiny())]


def test_a_converted_model_trains_and_evaluates_as_before():
    ours, theirs = tiny(), tiny()
    convert(ours, SerialComm())
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(4, 3, 32, 32, generator=generator).contiguous(memory_format=torch.channels_last)
    for training in (True, False):
        outs = [model.train(training)(images) for model in (ours, theirs)]
        torch.testing.assert_close(*outs, rtol=1e-3, atol=1e-4)
    for (name, one), other in zip(ours.state_dict().items(), theirs.state_dict().values(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}")


def test_each_sum_has_a_name_of_its_own_and_the_same_at_every_step():
    model, comm = tiny(), Rank()
    convert(model, comm)
    model(torch.randn(2, 3, 32, 32))
    first = list(comm.names)
    assert len(first) == len(set(first)) == 2 * len(layers(model))
    model(torch.randn(2, 3, 32, 32))
    assert comm.names == 2 * first
    model.eval()(torch.randn(2, 3, 32, 32))
    assert comm.names == 2 * first  # an evaluation says nothing


@pytest.mark.parametrize("training", [True, False])
def test_a_deep_copy_shares_nothing_but_the_ranks(training):
    comm = Rank()
    layer = SyncBatchNorm2d(plain(momentum=0.3, eps=0.01), comm, "bn").train(training)
    layer(features(2))
    twin = copy.deepcopy(layer)
    assert type(twin) is SyncBatchNorm2d
    assert twin.training == training
    assert (twin.eps, twin.momentum) == (0.01, 0.3)
    assert all(torch.equal(value, layer.state_dict()[name]) for name, value in twin.state_dict().items())
    before = copy.deepcopy(layer.state_dict())
    with torch.no_grad():
        twin.weight.add_(1.0)
    comm.names.clear()
    twin.train()(features(2, seed=4))
    assert comm.names == ["bn.mean", "bn.variance"]
    assert all(torch.equal(value, before[name]) for name, value in layer.state_dict().items())


def test_the_moving_average_takes_a_converted_model():
    model = tiny()
    convert(model, SerialComm())
    average = moving_average(model, horizon_steps=10.0)
    model(torch.randn(4, 3, 32, 32))
    average.update_parameters(model)
    assert list(average.module.state_dict()) == list(model.state_dict())
    assert all(type(layer) is SyncBatchNorm2d for layer in layers(average.module))
    assert torch.equal(average.module.features[0][1].running_mean, model.features[0][1].running_mean)


def test_what_is_converted_stays_where_and_as_it_was():
    model = nn.Sequential(nn.BatchNorm2d(3).double().eval(), nn.BatchNorm2d(3, device="meta"))
    model[0].weight.requires_grad_(False)
    convert(model, SerialComm())
    assert model[0].weight.dtype == torch.float64
    assert not model[0].training
    assert [one.requires_grad for one in model[0].parameters()] == [False, True]
    assert model[1].running_var.device.type == "meta"


def test_batch_norms_are_all_of_them():
    model = nn.Sequential(nn.BatchNorm2d(2), nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)), nn.LayerNorm(2))
    assert layers(model) == [model[0], model[1][1]]
