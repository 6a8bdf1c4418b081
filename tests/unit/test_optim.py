import copy

import pytest
import torch
from torch import nn

from hvdtrain import models, optim


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 2))


def decays(model, **options):
    groups = optim.parameter_groups(model, 0.25, **options)
    by_identity = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    assert len(by_identity) == sum(len(group["params"]) for group in groups)
    return {name: by_identity[id(one)] for name, one in model.named_parameters() if id(one) in by_identity}


def test_norms_and_biases_do_not_decay():
    assert decays(net(), decay_all=False) == {
        "0.weight": 0.25,
        "0.bias": 0.0,
        "1.weight": 0.0,
        "1.bias": 0.0,
        "3.weight": 0.25,
        "3.bias": 0.0,
    }


def test_decay_all_decays_everything():
    assert set(decays(net(), decay_all=True).values()) == {0.25}
    assert len(decays(net(), decay_all=True)) == 6


@pytest.mark.parametrize("decay_all", [False, True])
def test_frozen_parameters_are_in_no_group(decay_all):
    model = net()
    model[0].weight.requires_grad_(False)
    model[1].bias.requires_grad_(False)
    assert set(decays(model, decay_all=decay_all)) == {"0.bias", "1.weight", "3.weight", "3.bias"}


def test_every_parameter_of_an_efficientnet_is_in_a_group():
    model = models.build("efficientnet_tiny", classes=10)
    found = decays(model, decay_all=False)
    assert set(found) == {name for name, _ in model.named_parameters()}
    assert all(found[name] == (0.0 if one.ndim == 1 else 0.25) for name, one in model.named_parameters())


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "fused": True}),
        ("rmsprop", torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-3, "momentum": 0.9, "foreach": True}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999), "fused": True}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999), "fused": True}),
    ],
)
def test_optimizers_have_their_settings_and_keep_the_groups_decay(name, kind, expected):
    optimizer = optim.build(name, optim.parameter_groups(net(), 0.25, decay_all=False), 0.5)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert {key: group[key] for key in expected} == expected
    assert name in optim.BASE_LR


def test_fused_sgd_takes_the_step_of_the_formula():
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = optim.build("sgd", [{"params": [parameter], "weight_decay": 0.1}], 0.5)
    weight, velocity = parameter.detach().clone(), torch.zeros(1, 2)
    for gradient in (torch.tensor([[1.0, 2.0]]), torch.tensor([[-3.0, 0.5]])):
        parameter.grad = gradient.clone()
        optimizer.step()
        decayed = gradient + 0.1 * weight
        velocity = 0.9 * velocity + decayed
        weight = weight - 0.5 * (decayed + 0.9 * velocity)  # Nesterov
        assert torch.allclose(parameter.detach(), weight)


def states_of_training(steps):
    """A model's state after each of some made-up steps that change parameters and batch-norm buffers."""
    model = net()
    for step in range(steps):
        generator = torch.Generator().manual_seed(step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=generator))
        model(torch.randn(2, 3, 3, 3, generator=generator).repeat(2, 1, 1, 1))  # moves the running statistics
        yield model


@pytest.mark.parametrize(
    ("horizon_steps", "weights_after_the_first"),
    [
        (1e9, [9 / 11, 9 / 12, 9 / 13, 9 / 14]),  # memory still growing
        (1.25, [9 / 11, 0.8, 0.8, 0.8]),  # horizon reached at the third step
        (0.5, [1.0, 1.0, 1.0, 1.0]),  # less than a step: no memory
    ],
)
def test_moving_average_equals_a_loop(horizon_steps, weights_after_the_first):
    average = optim.moving_average(net(), horizon_steps=horizon_steps)
    expected = {}
    for step, model in enumerate(states_of_training(5)):
        average.update_parameters(model)
        state = copy.deepcopy(model.state_dict())
        for name, value in state.items():
            if step == 0 or not value.is_floating_point():
                expected[name] = value
            else:
                expected[name] = expected[name] + weights_after_the_first[step - 1] * (value - expected[name])
    got = average.module.state_dict()
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
        assert value.dtype == expected[name].dtype
    assert got["1.num_batches_tracked"] == 5
    assert not torch.allclose(got["1.running_mean"], torch.zeros(4))


def test_moving_average_leaves_the_model_alone():
    states = states_of_training(3)
    model = next(states)
    average = optim.moving_average(model, horizon_steps=100.0)
    before = copy.deepcopy(model.state_dict())
    average.update_parameters(model)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    before = copy.deepcopy(average.module.state_dict())
    next(states)
    assert all(torch.equal(value, before[name]) for name, value in average.module.state_dict().items())
