"""What a model keeps besides its weights: buffers and extra state that its forward pass changes as it likes."""

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations

from hvdtrain.checkpoint import state
from hvdtrain.core.model import state as model_state
from hvdtrain.core.model.equal import equal_models, start_equal
from hvdtrain.core.model.modes import TrainingModes, evaluating, outermost_in_eval
from hvdtrain.core.task import Sums, Task
from hvdtrain.recipe.average import MovingAverage
from tests.ranks import together
from tests.refusals import refused, require_facts
from tests.steps import step_of


class Centred(nn.Linear):
    """Subtracts a centre that each forward pass in training moves; how, a subclass says."""

    first: Any = torch.zeros(3)

    def __init__(self):
        super().__init__(3, 3)
        self.register_buffer("centre", None if self.first is None else self.first.clone())

    def forward(self, inputs):
        if self.training and len(inputs):
            self.move(inputs.detach().mean(0))
        return super().forward(inputs if self.centre is None else inputs - self.centre[:3])

    def move(self, mean):
        self.centre.mul_(0.5).add_(mean)


class Reassigned(Centred):
    def move(self, mean):
        self.centre = 0.5 * self.centre + mean


class Late(Centred):
    first = None

    def move(self, mean):
        self.centre = mean


class Growing(Centred):
    def move(self, mean):
        self.centre = torch.cat([self.centre, mean])


class Registered(Centred):
    """Has a further buffer from its first pass on."""

    def move(self, mean):
        self.register_buffer("mean", mean)


class Complex(Centred):
    first = torch.zeros(3, dtype=torch.complex64)

    def move(self, mean):
        self.centre.add_(mean * 1j)

    def forward(self, inputs):
        if self.training:
            self.move(inputs.mean(0))
        return nn.Linear.forward(self, inputs + self.centre.imag)


class Counted(Centred):
    """Saves a number that is no tensor."""

    passes = 0

    def move(self, mean):
        self.passes += 1

    def get_extra_state(self):
        return {"passes": self.passes, "notes": ["a"]}

    def set_extra_state(self, saved):
        self.passes = saved["passes"]


MODELS = [Centred, Reassigned, Late, Growing, Registered, Complex, Counted]


class Squares(Task):
    def loss(self, model, batch, *, training):
        return Sums(loss=mse_loss(model(batch["x"]), batch["x"], reduction="sum"), count=torch.tensor(1.0))


def values(seed=1):
    return torch.randn(4, 3, generator=torch.Generator().manual_seed(seed))


def trained(kind, *, seed=1, steps=2, average=True, comm=None, task=None):
    """A step on a model whose state has moved in some steps, and its ranks from then on."""
    torch.manual_seed(0)
    model = kind()
    followed = MovingAverage(model, horizon_steps=5.0) if average else None
    step = step_of(model, task=task or Squares(), average=followed, witnesses=[])
    for _ in range(steps):
        step([{"x": values(seed)}], backward_passes=1, global_count=4.0, lr=0.01)
    step.slots.comm = comm or step.slots.comm
    return step


def evaluated_on_all(step):
    names = step.task.averaged_buffers(step.model)
    return equal_models(step.slots.comm, step.model, lambda: step.evaluated, names)


def besides_parameters(model):
    own = model_state.state_of(model)
    return {**own.buffers, **own.extra}


def require_same(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]


@pytest.mark.parametrize("kind", MODELS)
def test_the_average_is_evaluated_with_the_models_buffers_as_they_are_now(kind):
    step = trained(kind)
    require_same(besides_parameters(step.evaluated), besides_parameters(step.model))
    assert besides_parameters(step.model).keys() != set()
    assert step.evaluated.get_parameter("weight") is not step.model.weight


def parts_of(step):
    return state.State(
        comm=step.slots.comm,
        device=step.device,
        seed=0,
        model=step.model,
        average=step.average,
        optimizer=step.optimizer,
        shared={},
        per_rank={},
        averaged_buffers=step.task.averaged_buffers,
    )


@pytest.mark.parametrize("kind", MODELS)
def test_a_state_comes_back_to_a_model_that_has_not_run(kind):
    step = trained(kind)
    shared, own = copy.deepcopy((state.shared_state(parts_of(step)), state.per_rank_state(parts_of(step))))
    again = trained(kind, steps=0)
    state.restore(parts_of(again), shared, own, step=2)
    require_same(dict(step.model.state_dict()), dict(again.model.state_dict()))
    require_same(dict(step.evaluated.state_dict()), dict(again.evaluated.state_dict()))


def test_buffers_that_are_not_persistent_are_no_state():
    model = nn.Linear(3, 3)
    model.register_buffer("cache", torch.zeros(2), persistent=False)
    assert model_state.state_of(model).buffers == {}
    with model_state.unchanged([model]):
        model.register_buffer("cache", torch.zeros(5), persistent=False)
    assert model.cache.shape == (2,)


class Renamed(nn.Linear):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}gain"] = destination.pop(f"{prefix}weight")


def drop_bias(_module, found, prefix, _metadata):
    del found[f"{prefix}bias"]


def hooked():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].register_state_dict_post_hook(drop_bias)
    return model


def shared_and_frozen():
    model = nn.Sequential(nn.BatchNorm1d(3), parametrizations.weight_norm(nn.Linear(3, 3)), nn.LSTM(3, 3))
    model.append(model[0])
    model[0].register_buffer("cache", torch.zeros(2), persistent=False)
    model[0].register_buffer("none", None)
    model[1].bias.requires_grad_(False)
    return model


@pytest.mark.parametrize("kind", [*MODELS, lambda: Renamed(3, 3), hooked, shared_and_frozen])
def test_the_state_is_that_of_state_dict(kind):
    model = kind()
    own, wanted = model_state.state_of(model), model.state_dict()
    held = {name for name, _ in model.named_buffers(remove_duplicate=False)}
    assert own.buffers.keys() == held & wanted.keys()
    assert own.extra.keys() == {name for name in wanted if name.endswith("_extra_state")}
    require_same({**own.without_buffers, **own.buffers}, wanted)
    assert not any(value.requires_grad for name, value in own.without_buffers.items() if name not in own.extra)


@pytest.mark.parametrize("kind", MODELS)
def test_a_trial_leaves_no_trace(kind):
    torch.manual_seed(0)
    model = kind()
    before = copy.deepcopy(besides_parameters(model))
    with model_state.unchanged(model.modules()):
        for _ in range(2):
            model(values())
    require_same(besides_parameters(model), before)


# --- several ranks


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_all_ranks_evaluate_the_buffers_of_rank_0(kind, average):
    def on_rank(comm):
        step = trained(kind, seed=comm.rank + 1, average=average, comm=comm)
        before = copy.deepcopy(besides_parameters(step.model))
        model, _ = evaluated_on_all(step)
        require_same(besides_parameters(model), besides_parameters(step.model))
        return before, besides_parameters(model)

    (of_rank_0, first), (of_rank_1, second) = together(2, on_rank)
    require_same(first, of_rank_0)
    require_same(second, of_rank_0)
    if kind is not Counted:
        with pytest.raises(AssertionError):
            require_same(of_rank_0, of_rank_1)


class MeanCentre(Squares):
    def averaged_buffers(self, model):
        return [*super().averaged_buffers(model), "centre"]


def test_a_task_names_buffers_that_are_averaged_instead():
    def on_rank(comm):
        step = trained(Reassigned, seed=comm.rank + 1, task=MeanCentre(), comm=comm)
        own = step.model.centre.clone()
        model, averaged = evaluated_on_all(step)
        assert torch.equal(model.centre, step.evaluated.centre)
        assert torch.equal(averaged[0][1], own)
        return own, model.centre

    (own_0, mean_0), (own_1, mean_1) = together(2, on_rank)
    assert torch.equal(mean_0, mean_1)
    torch.testing.assert_close(mean_0, (own_0 + own_1) / 2)


def test_on_another_number_of_ranks_it_is_resumed_by_the_same_rule():
    steps = [trained(Reassigned, seed=seed) for seed in (1, 2)]
    own = [step.model.centre for step in steps]
    for task, expected in ((Squares(), own[0]), (MeanCentre(), sum(own) / 2)):
        for step in steps:
            step.task = task
        mean = state.average_state(copy.deepcopy(state.per_rank_state(parts_of(step))) for step in steps)
        again = trained(Reassigned, steps=0, task=task)
        state.restore(parts_of(again), state.shared_state(parts_of(steps[0])), mean, step=2)
        torch.testing.assert_close(again.model.centre, expected)
        torch.testing.assert_close(again.evaluated.centre, expected)


def test_the_extra_state_of_each_rank_is_resumed():
    steps = [trained(Counted), trained(Counted, seed=2)]
    steps[1].model.passes = 7
    shared = state.shared_state(parts_of(steps[0]))
    again = trained(Counted, steps=0)
    state.restore(parts_of(again), shared, state.per_rank_state(parts_of(steps[1])), step=2)
    assert again.model.passes == 7


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_are_averaged_and_spectral_norms_vectors_are_not(kind):
    def on_rank(comm):
        torch.manual_seed(comm.rank)
        model = nn.Sequential(
            nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)), kind(3, track_running_stats=True)
        )
        model(torch.randn(5, 3, 4))
        vector = model[0].parametrizations.weight[0]._u.clone()
        step = step_of(model, task=Squares(), witnesses=[], comm=comm)
        own = model[1].running_mean.clone()
        evaluated_on_all(step)
        return vector, model[0].parametrizations.weight[0]._u, own, model[1].running_mean

    (vector, vector_0, own_0, mean_0), (_, vector_1, own_1, mean_1) = together(2, on_rank)
    assert torch.equal(vector_0, vector)
    assert torch.equal(vector_1, vector)
    assert torch.equal(mean_0, mean_1)
    torch.testing.assert_close(mean_0, (own_0 + own_1) / 2)


def test_instance_norm_without_a_sample_keeps_its_statistics():
    model = nn.Sequential(nn.InstanceNorm1d(1, track_running_stats=True), nn.Linear(3, 3))
    step = step_of(model, task=Squares(), witnesses=[])
    step([{"x": torch.zeros(0, 1, 3)}], backward_passes=1, global_count=4.0, lr=0.01)
    assert (model[0].running_mean.tolist(), model[0].training) == ([0.0], True)


def test_ranks_begin_with_the_state_of_rank_0():
    def on_rank(comm):
        torch.manual_seed(comm.rank)
        model = Reassigned().to(torch.bfloat16)
        model.centre = torch.full((2 - comm.rank,), comm.rank, dtype=torch.bool)
        start_equal(comm, model)
        return dict(model.state_dict())

    one, other = together(2, on_rank)
    require_same(one, other)


# --- modes


def test_modules_that_the_program_has_put_into_eval_mode_stay_so():
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(nn.Dropout(), nn.BatchNorm1d(3)), nn.Dropout())
    model[1].eval()
    modes = TrainingModes(model)
    before = [module.training for module in model.modules()]
    with evaluating(model):
        assert not any(module.training for module in model.modules())
    assert [module.training for module in model.modules()] == before
    assert outermost_in_eval(model) == ["1"]
    modes.keep()
    model.eval()
    modes.keep()
    modes.restore()
    assert [module.training for module in model.modules()] == before
    model[2].eval()
    modes.restore()  # the body of a loop has changed it
    assert not model[2].training


def test_a_model_that_is_passed_in_eval_mode_trains_whole():
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout()).eval()
    TrainingModes(model).restore()
    assert all(module.training for module in model.modules())


# --- copies


class Keeps(nn.Linear):
    """Keeps its last output, as programs do to look at it."""

    def forward(self, inputs):
        self.last = {"outputs": [super().forward(inputs)]}
        return self.last["outputs"][0]


@pytest.mark.parametrize("make", [lambda: Keeps(3, 3), lambda: nn.utils.weight_norm(nn.Linear(3, 3))])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_a_model_that_holds_results_of_a_forward_pass_is_copied(make):
    model = make()
    outputs = model(values())
    twin = model_state.copy_of(model, remedy="")
    assert torch.equal(twin(values()), outputs)
    assert not {id(one) for one in twin.parameters()} & {id(one) for one in model.parameters()}


def test_a_model_that_cannot_be_copied_is_refused():
    model = nn.Linear(3, 3)
    model.lock = threading.Lock()
    require_facts(
        refused(lambda: MovingAverage(model, horizon_steps=1.0)), "cannot be copied ... lock ... --ema-epochs 0"
    )
