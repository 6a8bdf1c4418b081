import numpy as np
import pytest
import torch
from torch import nn

from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from tests.unit.core.test_replicas import net


def decays(model, **options):
    groups = optim.parameter_groups(model, 0.25, **options)
    by_identity = {id(one): group["weight_decay"] for group in groups for one in group["params"]}
    assert len(by_identity) == sum(len(group["params"]) for group in groups)
    return {name: by_identity[id(one)] for name, one in model.named_parameters() if id(one) in by_identity}


def test_norms_and_biases_do_not_decay_unless_all_do_and_what_is_frozen_is_in_no_group():
    model = net()
    model[1].bias.requires_grad_(False)
    weights, others = {"0.weight": 0.25, "3.weight": 0.25}, ("0.bias", "1.weight", "3.bias")
    assert decays(model, decay_all=False) == weights | dict.fromkeys(others, 0.0)
    assert decays(model, decay_all=True) == weights | dict.fromkeys(others, 0.25)


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("sgd", torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        ("rmsprop", torch.optim.RMSprop, {"alpha": 0.9, "eps": 1e-3, "momentum": 0.9}),
        ("adam", torch.optim.Adam, {"betas": (0.9, 0.999)}),
        ("adamw", torch.optim.AdamW, {"betas": (0.9, 0.999)}),
        ("lars", optim.Lars, {"momentum": 0.9, "trust": 0.001}),
        ("lamb", optim.Lamb, {"betas": (0.9, 0.999), "eps": 1e-6}),
    ],
)
def test_optimizers_have_their_settings(name, kind, expected):
    optimizer = optim.BUILD[name](optim.parameter_groups(net(), 0.25, decay_all=False), 0.5)
    assert type(optimizer) is kind
    for group in optimizer.param_groups:
        assert {key: group[key] for key in expected} == expected


def test_the_first_step_of_sgd_has_no_momentum_of_before():
    parameter = nn.Parameter(torch.ones(2))
    optimizer = optim.BUILD["sgd"]([{"params": [parameter], "weight_decay": 0.0}], 0.5)
    parameter.grad = torch.tensor([1.0, -2.0])
    optimizer.step()
    torch.testing.assert_close(parameter.detach(), 1 - 0.5 * 1.9 * parameter.grad)  # Nesterov's


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


@pytest.mark.parametrize(("name", "formula"), [("lars", lars_step), ("lamb", lamb_step)])
@pytest.mark.parametrize("are_zero", [False, True], ids=["weights", "weights of zero"])
@pytest.mark.parametrize("zero_at", [(), (1,), (1, 2, 3)])
def test_layerwise_steps_are_those_of_the_formula(name, formula, are_zero, zero_at):
    decay = (0.1, 0.0, 0.3)
    before = [one * (not are_zero) for one in random_arrays(0)]
    after = three_steps(name, formula, before, random_arrays(1), decay, zero_at=zero_at)
    for one, other, each in zip(before, after, decay, strict=True):
        stays = zero_at == (1, 2, 3) and (are_zero or not each)
        assert np.isfinite(other).all()
        assert np.array_equal(one, other) == stays


@pytest.mark.parametrize("name", ["lars", "lamb"])
def test_parameters_without_gradient_are_left_alone(name):
    used, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
    optimizer = optim.BUILD[name]([{"params": [used, unused], "weight_decay": 0.1}], 0.5)
    used.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.equal(unused, torch.ones(2, 2))
    assert not torch.equal(used, torch.ones(2, 2))
    assert list(optimizer.state) == [used]
