import copy

import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.recipe.optimizers import OPTIMIZERS
from hvdtrain.vision import models


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
        ("lars", optim.Lars, {"momentum": 0.9, "trust": 0.001}),
        ("lamb", optim.Lamb, {"betas": (0.9, 0.999), "eps": 1e-6}),
    ],
)
def test_optimizers_have_their_settings_and_keep_the_groups_decay(name, kind, expected):
    optimizer = optim.BUILD[name](optim.parameter_groups(net(), 0.25, decay_all=False), 0.5)
    assert type(optimizer) is kind
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    for group in optimizer.param_groups:
        assert group["lr"] == 0.5
        assert {key: group[key] for key in expected} == expected
    assert list(OPTIMIZERS) == list(optim.BUILD)


def test_fused_sgd_takes_the_step_of_the_formula():
    parameter = nn.Parameter(torch.tensor([[1.0, -2.0]]))
    optimizer = optim.BUILD["sgd"]([{"params": [parameter], "weight_decay": 0.1}], 0.5)
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
    states = states_of_training(5)
    average = None
    expected = {}
    for step, model in enumerate(states):
        average = average or MovingAverage(model, horizon_steps=horizon_steps)
        if step == 2:
            average.follow(torch.tensor(1.0))  # a step that is skipped
        average.follow(torch.tensor(0.0))
        state = {name: one.clone() for name, one in model.state_dict().items() if one.is_floating_point()}
        for name, value in state.items():
            if step == 0:
                expected[name] = value
            else:
                expected[name] += weights_after_the_first[step - 1] * (value - expected[name])
    got = {name: one for name, one in average.module.state_dict().items() if one.is_floating_point()}
    assert got.keys() == expected.keys()
    for name, value in got.items():
        assert torch.allclose(value, expected[name], atol=1e-6), name
        assert value.dtype == expected[name].dtype
    assert average.n_averaged == 5
    assert not torch.allclose(got["1.running_mean"], torch.zeros(4))


def test_moving_average_leaves_the_model_alone():
    states = states_of_training(3)
    model = next(states)
    average = MovingAverage(model, horizon_steps=100.0)
    before = copy.deepcopy(model.state_dict())
    average.follow(torch.tensor(0.0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    before = copy.deepcopy(average.module.state_dict())
    next(states)
    assert all(torch.equal(value, before[name]) for name, value in average.module.state_dict().items())


def lars_step(weight, gradient, memory, *, lr, decay, step):
    """You, Gitman and Ginsburg 2017, algorithm 1, with trust 0.001 and momentum 0.9."""
    if decay:
        size, slope = np.linalg.norm(weight), np.linalg.norm(gradient)
        local = 0.001 * size / (slope + decay * size) if size and slope else 1.0
        gradient = local * (gradient + decay * weight)
    velocity = 0.9 * memory.get("velocity", 0.0) + lr * gradient
    return weight - velocity, {"velocity": velocity}


def lamb_step(weight, gradient, memory, *, lr, decay, step):
    """You et al. 2020, algorithm 2, with beta 0.9 and 0.999, epsilon 1e-6; a vector takes the plain step of Adam."""
    first = 0.9 * memory.get("first", 0.0) + 0.1 * gradient
    second = 0.999 * memory.get("second", 0.0) + 0.001 * gradient**2
    update = (first / (1 - 0.9**step)) / (np.sqrt(second / (1 - 0.999**step)) + 1e-6) + decay * weight
    size, length = np.linalg.norm(weight), np.linalg.norm(update)
    ratio = size / length if size and length and weight.ndim > 1 else 1.0
    return weight - lr * ratio * update, {"first": first, "second": second}


def three_steps(name, formula, weights, gradients, decay, *, zero_at=()):
    """Take three steps and compare the weights after each with the formula's; return these.

    The gradient is zero at the steps `zero_at`.
    """
    parameters = [nn.Parameter(torch.from_numpy(weight).float()) for weight in weights]
    groups = [{"params": [one], "weight_decay": each} for one, each in zip(parameters, decay, strict=True)]
    optimizer = optim.BUILD[name](groups, 0.5)
    weights, memories = list(weights), [{} for _ in weights]
    for step, lr in enumerate((0.5, 0.25, 1.0), start=1):
        for number, (group, parameter) in enumerate(zip(optimizer.param_groups, parameters, strict=True)):
            gradient = gradients[number] * (0 if step in zero_at else step)
            group["lr"] = lr
            parameter.grad = torch.from_numpy(gradient).float()
            weights[number], memories[number] = formula(
                weights[number], gradient, memories[number], lr=lr, decay=decay[number], step=step
            )
        optimizer.step()
        for number, parameter in enumerate(parameters):
            found = parameter.detach().numpy()
            np.testing.assert_allclose(found, weights[number], rtol=1e-4, atol=1e-6, err_msg=f"{number} at {step}")
    return weights


def random_arrays(seed):
    random = np.random.default_rng(seed)
    return [random.normal(size=shape) for shape in ((4, 3, 2, 2), (5, 4), (5,))]


FORMULAS = pytest.mark.parametrize(("name", "formula"), [("lars", lars_step), ("lamb", lamb_step)])
NAMES = pytest.mark.parametrize("name", ["lars", "lamb"])


@FORMULAS
@pytest.mark.parametrize("decay", [(0.1, 0.1, 0.0), (0.0, 0.0, 0.0), (0.1, 1e-4, 0.3)])
@pytest.mark.parametrize("zero_at", [(), (1,), (2,), (1, 2, 3)])
def test_layerwise_steps_are_those_of_the_formula(name, formula, decay, zero_at):
    before = random_arrays(0)
    after = three_steps(name, formula, before, random_arrays(1), decay, zero_at=zero_at)
    for one, other, each in zip(before, after, decay, strict=True):
        assert np.isfinite(other).all()
        assert np.array_equal(one, other) == (zero_at == (1, 2, 3) and not each)


@FORMULAS
def test_layerwise_steps_leave_weights_of_zero(name, formula):
    weights = [np.zeros_like(one) for one in random_arrays(0)]
    assert all(one.all() for one in three_steps(name, formula, weights, random_arrays(1), (0.1, 0.1, 0.0)))


@FORMULAS
def test_layerwise_steps_of_zero_gradients_at_zero_weights_are_none(name, formula):
    weights = [np.zeros_like(one) for one in random_arrays(0)]
    after = three_steps(name, formula, weights, random_arrays(1), (0.1, 0.1, 0.0), zero_at=(1, 2, 3))
    assert not any(one.any() for one in after)


def test_lars_takes_the_plain_momentum_step_without_decay():
    ours, theirs = (nn.Parameter(torch.arange(6.0).view(2, 3)) for _ in range(2))
    lars = optim.BUILD["lars"]([{"params": [ours], "weight_decay": 0.0}], 0.1)
    sgd = torch.optim.SGD([theirs], lr=0.1, momentum=0.9)
    for number in range(3):
        for parameter, optimizer in ((ours, lars), (theirs, sgd)):
            parameter.grad = torch.full((2, 3), 1.0 + number)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_lamb_takes_the_step_of_adam_for_norms_and_biases_that_start_at_zero(decay):
    ours, theirs = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    lamb = optim.BUILD["lamb"]([{"params": [ours], "weight_decay": decay}], 1e-3)
    adam = torch.optim.AdamW([theirs], lr=1e-3, eps=1e-6, weight_decay=decay)
    for number in range(3):
        for parameter, optimizer in ((ours, lamb), (theirs, adam)):
            parameter.grad = torch.tensor([1.0, -2.0, 0.5]) * (1 + number)
            optimizer.step()
    torch.testing.assert_close(ours, theirs)


def test_lamb_counts_steps_in_a_tensor():
    parameter = nn.Parameter(torch.ones(2, 2))
    optimizer = optim.BUILD["lamb"]([{"params": [parameter], "weight_decay": 0.1}], 1e-3)
    for number in range(1, 3):
        parameter.grad = torch.ones(2, 2)
        optimizer.step()
        assert torch.equal(optimizer.state[parameter]["step"], torch.tensor(float(number)))


@NAMES
def test_layerwise_steps_do_not_depend_on_the_size_of_the_gradient(name):
    """That is their point; for LARS it holds where the decay is small beside the gradient."""
    found = []
    for factor in (1.0, 1000.0):
        parameter = nn.Parameter(torch.arange(1.0, 7.0).view(2, 3))
        parameter.grad = factor * torch.tensor([[1.0, -2.0, 3.0], [0.5, -0.5, 4.0]])
        optim.BUILD[name]([{"params": [parameter], "weight_decay": 1e-6}], 0.5).step()
        found.append(parameter.detach())
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
    assert not torch.allclose(found[0], torch.arange(1.0, 7.0).view(2, 3), rtol=0, atol=1e-4)


@NAMES
def test_parameters_without_gradient_are_left_alone(name):
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = optim.BUILD[name]([{"params": [used, unused], "weight_decay": 0.1}], 0.5)
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert not torch.equal(used, torch.ones(2, 2))
    assert list(optimizer.state) == [used]


@NAMES
def test_layerwise_state_goes_through_a_state_dict(name):
    found = []
    for restart in (False, True):
        parameter = nn.Parameter(torch.arange(1.0, 5.0).view(2, 2))
        optimizer = optim.BUILD[name]([{"params": [parameter], "weight_decay": 0.1}], 0.5)
        for number in range(3):
            if restart and number == 2:
                state = copy.deepcopy(optimizer.state_dict())
                optimizer = optim.BUILD[name]([{"params": [parameter], "weight_decay": 0.1}], 0.5)
                optimizer.load_state_dict(state)
            parameter.grad = torch.tensor([[1.0, 2.0], [-1.0, 0.5]]) + number
            optimizer.step()
        found.append(parameter.detach())
    assert torch.equal(*found)
