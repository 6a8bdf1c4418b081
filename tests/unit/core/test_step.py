import copy
import math
import weakref
from itertools import repeat

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from hvdtrain.core.every_step import EveryStep
from hvdtrain.core.finite import SUM, Skipped
from hvdtrain.core.parts import Part
from hvdtrain.core.step import Step, Witness
from hvdtrain.loop.witnesses.find_nan import FindNan
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.tasks.vision import models
from tests.ranks import Rank
from tests.steps import conv_net, run_step, same, step_of, task_of

# Sums of the same numbers in another order differ in the last bits of float32; a gradient that is wrong by one image
# in eight differs by a tenth.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def tiny():
    torch.manual_seed(0)
    return models.build("efficientnet_tiny", classes=10, dropout=0.0, stochastic_depth=0.0)


def batch(count, *, seed=0, side=32):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(count, 3, side, side, generator=generator)
    return images, torch.randint(0, 10, (count,), generator=generator)


def floats(model):
    """Its parameters and batch norm's running statistics."""
    return [*model.parameters(), *(one for one in model.buffers() if one.is_floating_point())]


def cut(images, labels, *sizes):
    return list(zip(images.split(sizes), labels.split(sizes), strict=True))


def assert_same_weights(ours, theirs):
    for (name, one), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, **CLOSE, msg=lambda text, name=name: f"{name}: {text}")


def test_micro_batches_make_the_step_of_the_whole_batch():
    whole, parts = conv_net().eval(), conv_net().eval()  # batch norm in eval mode: its statistics depend on the batch
    images, labels = batch(8)
    done_whole = run_step(step_of(whole), (images, labels))
    done_parts = run_step(step_of(parts), *cut(images, labels, 3, 3, 2))
    assert_same_weights(parts, whole)
    torch.testing.assert_close(done_parts.totals["loss"], done_whole.totals["loss"], **CLOSE)
    assert done_parts.totals["right"] == done_whole.totals["right"]


class Recording(GradientSync):
    """A sync that keeps what it was told and the gradients at the end, or puts others, or a number, in their place."""

    def __init__(self, model, gradients=None):
        self.model, self.gradients, self.calls, self.overflows = model, gradients, [], []

    def expect(self, backward_passes):
        assert all(parameter.grad is None for parameter in self.model.parameters())
        self.calls.append(("expect", backward_passes))

    def finish(self):
        self.calls.append(("finish",))
        self.found = [None if one.grad is None else one.grad.clone() for one in self.model.parameters()]
        if self.gradients is not None:
            given = repeat(self.gradients) if isinstance(self.gradients, float) else self.gradients
            for parameter, gradient in zip(self.model.parameters(), given, strict=False):
                parameter.grad = torch.as_tensor(gradient).expand_as(parameter).clone()

    def end_step(self, *, overflowed):
        self.overflows.append(overflowed)


@pytest.mark.parametrize(("device", "ranks", "overlaps"), [("cuda", 2, False), ("cuda", 1, True), ("cpu", 2, True)])
def test_sums_wait_for_backward_if_the_parts_of_a_replica_talk_over_nccl_too(monkeypatch, device, ranks, overlaps):
    model = conv_net()
    sync, comm = Recording(model), SerialComm()
    monkeypatch.setattr(SerialComm, "replica", Rank(size=ranks))
    step = step_of(model, comm=comm, sync=sync, witnesses=[])
    monkeypatch.setattr(Step, "device", torch.device(device))
    run_step(step, batch(4))
    assert sync.overlap == overlaps


def test_rank_without_images_still_takes_the_others_step():
    model = conv_net().train()
    before, statistics = copy.deepcopy([list(model.parameters()), list(model.buffers())])
    sync = Recording(model, 1.0)
    done = run_step(step_of(model, sync=sync), batch(0), batch(0), global_count=2, lr=0.25)
    assert sync.calls == [("expect", 2), ("finish",)]
    assert all(gradient is not None and not gradient.any() for gradient in sync.found)
    assert (done.totals["loss"], done.totals["right"], done.skipped) == (0, 0, None)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(new, old - 0.25)
    assert same(statistics, list(model.buffers()))


def change_of(gradient, **options):
    """What a step of SGD with rate 1 changes a weight by, when the sum over ranks is `gradient`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 2, 10, bias=False))
    given = torch.zeros(10, 12)
    given[0, : len(gradient)] = torch.tensor(gradient)
    before = model[1].weight.detach().clone()
    run_step(step_of(model, sync=Recording(model, [given]), **options), batch(2, side=2), lr=1.0)
    return (before - model[1].weight.detach())[0, : len(gradient)]


@pytest.mark.parametrize(
    ("gradient", "options", "expected"),
    [
        ((3.0, -4.0, 0.5), {"clip_value": 1.0}, [1.0, -1.0, 0.5]),
        ((3.0, -4.0, 0.5), {"clip_norm": 1.0}, [each / math.sqrt(25.25) for each in (3.0, -4.0, 0.5)]),
        # norm first would give 0.60, -0.80, 0.10
        ((3.0, -4.0, 0.5), {"clip_value": 1.0, "clip_norm": 1.0}, [2 / 3, -2 / 3, 1 / 3]),
        ((3.0, -4.0, 0.5), {"clip_value": 10.0, "clip_norm": 10.0}, [3.0, -4.0, 0.5]),
        # the square of 1e30 is infinite, so a check of the usual norm would skip this step
        ((1e30, -1e30, 0.5), {"clip_value": 1.0, "clip_norm": 1.0}, [2 / 3, -2 / 3, 1 / 3]),
    ],
)
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_the_unscaled_sum_is_clipped_by_value_and_then_by_norm(gradient, options, expected, scale):
    scaler = GradScaler("cpu", enabled=scale != 1, init_scale=scale)
    change = change_of([scale * each for each in gradient], scaler=scaler, **options)
    torch.testing.assert_close(change, torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_the_measured_norm_is_that_of_all_unscaled_gradients_before_clipping():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    gradients = [torch.zeros(10, 12), torch.zeros(10)]
    gradients[0][0, 0], gradients[1][0] = 3.0 * 1024, 4.0 * 1024
    scaler = GradScaler("cpu", enabled=True, init_scale=1024.0)
    step = step_of(model, sync=Recording(model, gradients), scaler=scaler, clip_value=1.0, clip_norm=1.0)
    assert math.isnan(run_step(step, batch(2, side=2)).grad_norm)  # not asked for
    assert run_step(step, batch(2, side=2), measure=True).grad_norm == pytest.approx(5.0)


def test_single_image_trains_with_the_running_statistics_and_two_have_their_own():
    model = tiny().train()
    run_step(step_of(model), batch(2, side=16), lr=0.001)  # 16 pixels leave the tiny model 1 x 1 features
    assert all(value == 1 for name, value in model.named_buffers() if "num_batches" in name)
    running = copy.deepcopy(dict(model.named_buffers()))
    reference = copy.deepcopy(model).eval()
    images, labels = batch(1, seed=3, side=16)
    done = run_step(step_of(model), (images, labels))
    expected = functional.cross_entropy(reference(images), labels).item()
    assert done.totals["loss"] == pytest.approx(expected, rel=1e-4, abs=1e-5)
    assert all(torch.equal(value, running[name]) for name, value in model.named_buffers())
    assert all(layer.training for layer in model.modules())
    assert not torch.equal(model.classifier[1].weight, reference.classifier[1].weight)


@pytest.mark.parametrize(
    ("precision", "dtype"), [("tf32", torch.float32), ("fp32", torch.float32), ("bf16", torch.bfloat16)]
)
def test_precision_is_the_one_the_layers_compute_in(monkeypatch, precision, dtype):
    model, seen = conv_net().train(), []
    model[0].register_forward_hook(lambda _layer, _inputs, output: seen.append(output.dtype))
    plain = functional.cross_entropy

    def watched(logits, *rest, **options):
        loss = plain(logits, *rest, **options)
        seen.extend([logits.dtype, loss.dtype])
        return loss

    monkeypatch.setattr(functional, "cross_entropy", watched)
    run_step(step_of(model, precision=precision), batch(4))
    assert seen == [dtype, torch.float32, torch.float32]
    assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float32


def optimizer_for(name, model):
    return optim.BUILD[name](optim.parameter_groups(model, 5e-4, decay_all=False), 0.01)


def test_parameters_that_do_not_learn_are_left_alone():
    model = conv_net()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    run_step(step_of(model, optimizer=torch.optim.SGD(learning, lr=1.0), clip_norm=1.0, clip_value=1.0), batch(4))
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None


def test_a_parameter_that_an_earlier_part_counts_is_left_out_of_the_norm():
    model = nn.Linear(1, 1)
    model.weight.grad, model.bias.grad = torch.tensor([[3.0]]), torch.tensor([4.0])
    step = step_of(model)
    assert step._norm().item() == 5
    step.slots.where.part = Part(SerialComm(), {id(model.bias)})
    assert step._norm().item() == 3


def test_accumulation_frees_each_micro_batch_before_it_takes_the_next_but_one():
    alive, most = [], []

    def micro_batches():
        for number in range(16):
            images, labels = good(number)
            alive.append(weakref.ref(images))
            most.append(sum(one() is not None for one in alive))
            yield {"images": images, "labels": labels}
            del images, labels

    step_of(conv_net().train(), witnesses=[])(micro_batches(), backward_passes=16, global_count=64, lr=0.1)
    assert max(most) <= 2


# --- steps that are not finite


class Faulty(torch.autograd.Function):
    """The identity, whose gradient is multiplied."""

    @staticmethod
    def forward(ctx, values, factor):
        ctx.factor = factor
        return values.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class InfiniteGradient(nn.Module):
    """A model whose loss is right and whose gradients overflow for a batch with a zero as its first number."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, images):
        bad = len(images) > 0 and images[0, 0, 0, 0] == 0
        return Faulty.apply(self.body(images), math.inf if bad else 1.0)


def overflowing():
    return InfiniteGradient(conv_net()).train()


class InfiniteLoss(nn.Module):
    """A model that rules out class 9: its loss for label 9 is infinite, the gradients (softmax - target) are not."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.offset = torch.tensor([0.0] * 9 + [-math.inf])

    def forward(self, images):
        return self.body(images) + self.offset


def nan_image():
    images, labels = batch(8, seed=5)
    images[3, 1, 2, 2] = math.nan
    return images, labels


def bad_gradient():
    images, labels = batch(8, seed=5)
    images[0, 0, 0, 0] = 0.0
    return images, labels


def label_nine():
    images, labels = batch(8, seed=5)
    labels[labels == 9] = 0
    labels[3] = 9
    return images, labels


def good(number):
    images, labels = batch(8, seed=100 + number)
    return images, labels % 9  # 9 has an infinite loss in one of the models


BAD = pytest.mark.parametrize(
    ("wrap", "bad", "source"),
    [
        (nn.Sequential, nan_image, "loss"),
        (InfiniteGradient, bad_gradient, "gradients"),
        (InfiniteLoss, label_nine, "loss"),
    ],
)


def state_of(optimizer):
    state = copy.deepcopy(optimizer.state_dict())
    for group in state["param_groups"]:
        del group["lr"]
    return state


@BAD
@pytest.mark.parametrize(("optimizer", "scales"), [("sgd", True), ("adamw", False), ("lamb", True)])
def test_steps_that_are_not_finite_leave_no_trace_but_half_the_loss_scale(wrap, bad, source, optimizer, scales):
    """A first one, too: torch's fused SGD takes uninitialised memory for the momentum of a first step that it skips."""
    found = []
    for batches in ([bad(), good(1), bad(), good(2)], [good(1), good(2)]):
        model = wrap(conv_net()).train()
        average = MovingAverage(model, horizon_steps=50.0)
        scaler = GradScaler("cpu", enabled=scales, init_scale=64.0)
        kept = {"average": average, "scaler": scaler, "clip_value": 1.0, "clip_norm": 1.0}
        step = step_of(model, optimizer=optimizer_for(optimizer, model), **kept)
        done = [run_step(step, *cut(*one, 3, 3, 2), lr=0.01) for one in batches]
        skips = [one for one in done if one.skipped]
        assert [one.skipped for one in skips] == [Skipped(rank=0, source=source)] * (len(batches) - 2)
        assert scaler.get_scale() == (64.0 / 2 ** len(skips) if scales else 1.0)
        assert all(math.isfinite(one.totals["loss"]) == (source == "gradients") for one in skips)
        assert all(layer.training for layer in model.modules())
        weights = [*floats(model), *floats(average), average.n_averaged]
        found.append((weights, state_of(step.optimizer), [one.totals["loss"] for one in done if not one.skipped]))
    assert same(*found)


@pytest.mark.parametrize(
    ("rank", "answers", "micro_batch", "named"),
    [
        (0, [[..., "loss", "loss"]], good(1), (1, "loss")),
        (1, [[None, ..., "loss"]], good(1), (2, "loss")),
        (1, [[None, ..., "loss"]], nan_image(), (1, "loss")),
        (1, [[None, ..., None], [True, ..., False]], bad_gradient(), (0, "gradients")),
        (1, [[None, ..., None], [False, ..., True]], bad_gradient(), (1, "gradients")),
        (1, [[None, ..., None], [False, ..., True]], batch(0), (2, "gradients")),
        (1, [[None, ..., None], [False, ..., False]], good(1), (None, SUM)),
    ],
)
def test_the_first_rank_that_was_not_finite_is_named_where_their_sum_is_not(rank, answers, micro_batch, named):
    comm, model = Rank(rank, 3, answers=answers), overflowing()
    before = copy.deepcopy(floats(model))
    done = run_step(step_of(model, comm=comm, sync=Recording(model, math.nan)), micro_batch, global_count=24)
    assert same(before, floats(model))
    assert comm.answers == []
    assert (done.skipped.rank, done.skipped.source) == named
    assert comm.said[0] == ("loss" if named == (rank, "loss") else None)


class LastTwo(EveryStep):
    """The last two of four ranks step together."""

    def __init__(self, group):
        self._group = group

    def step_group(self, comm):
        return self._group


@pytest.mark.parametrize(("answers", "source"), [([[..., "loss"]], "loss"), ([[..., None], [..., True]], "gradients")])
def test_a_rank_of_a_later_group_is_named_by_its_number_among_all(answers, source):
    model = overflowing()
    when = LastTwo(Rank(0, 2, answers=answers))
    step = step_of(model, comm=Rank(2, 4), when=when, sync=Recording(model, math.nan))
    assert run_step(step, good(1), global_count=24).skipped == Skipped(rank=3, source=source, ranks="ranks 2 to 3")


@pytest.mark.parametrize("place", [0, 2])
def test_gradients_that_are_not_finite_are_found_in_whichever_pass(place):
    batches = [good(1), good(2), good(3)]
    batches[place] = bad_gradient()
    comm = Rank(1, 2, answers=[[None, ...], [False, ...]])
    done = run_step(step_of(overflowing(), comm=comm), *batches)
    assert done.skipped == Skipped(rank=1, source="gradients")
    assert comm.said == [None, True]


def test_what_one_witness_has_found_outlives_another_that_finds_nothing():
    step = step_of(overflowing(), witnesses=[FindNan(), Witness()])
    assert run_step(step, bad_gradient()).skipped == Skipped(rank=0, source="gradients")


@pytest.mark.parametrize(
    ("others", "micro_batch", "source"),
    [
        (False, good(1), SUM),  # finite on each rank, but not their sum
        (True, good(1), "gradients"),
        (False, bad_gradient(), "gradients"),
    ],
)
def test_loss_scale_and_wire_hear_of_every_sum_that_is_not_finite(others, micro_batch, source):
    comm = Rank(0, 2, answers=[[..., None], [..., others]])
    model = overflowing()
    sync = Recording(model)
    scaler = GradScaler("cpu", enabled=True, init_scale=64.0)
    step = step_of(model, comm=comm, sync=sync, scaler=scaler)
    assert run_step(step, good(2), global_count=16).skipped is None
    sync.gradients = math.inf
    assert run_step(step, micro_batch, global_count=16).skipped.source == source
    sync.gradients = None
    assert run_step(step, good(3), global_count=16).skipped is None
    assert sync.overflows == [False, source == SUM, False]
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize(
    ("others", "found"), [(None, Skipped(rank=None, source=SUM)), ("loss", Skipped(rank=1, source="loss"))]
)
def test_unless_asked_nobody_looks_for_gradients_a_second_time(others, found):
    comm = Rank(0, 2, answers=[[..., others]])
    model = overflowing()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    step = step_of(model, comm=comm, sync=Recording(model, math.nan), witnesses=[])
    assert run_step(step, bad_gradient(), global_count=16).skipped == found
    assert len(forwards) == 1


def test_a_good_step_asks_the_other_ranks_nothing():
    comm = Rank(1, 2, answers=[[None, None]])
    assert run_step(step_of(conv_net(), comm=comm), batch(4)).skipped is None
    assert comm.said == []


@pytest.mark.parametrize("value", [-math.inf, math.nan])
@pytest.mark.parametrize("options", [{}, {"clip_value": 1.0, "clip_norm": 1.0}])
def test_one_element_of_the_sum_is_enough_and_clipping_does_not_hide_it(value, options):
    assert change_of([3.0, value, 0.5], **options).tolist() == [0.0, 0.0, 0.0]


def test_a_search_for_gradients_draws_the_random_numbers_of_the_last_pass_once_more():
    """So that they meet the same dropout, and the next step the numbers that it would have met."""
    after = []
    for micro_batch in (good(1), bad_gradient()):
        model = InfiniteGradient(nn.Sequential(*conv_net()[:5], nn.Dropout(0.5), nn.Linear(8, 10))).train()
        torch.manual_seed(1)
        run_step(step_of(model), micro_batch)
        after.append(torch.get_rng_state())
        assert [value.item() for name, value in model.named_buffers() if name.endswith("batches_tracked")] == [1]
    assert torch.equal(*after)


class Centred(nn.Module):
    """Keeps its own mean, and all that it has seen."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 3, 1, 1))
        self.register_buffer("seen", torch.full((1,), torch.inf))

    def forward(self, images):
        self.mean.lerp_(images.mean((0, 2, 3), keepdim=True), 0.1)
        self.seen = torch.cat([self.seen, images[:1, 0, 0, 0]])
        return images - self.mean


def test_a_skipped_step_takes_back_what_the_task_averages():
    model = nn.Sequential(Centred(), conv_net()).train()
    task = task_of()
    task.averaged_buffers = lambda _: ["0.mean", "0.seen", "1.1.running_mean"]
    step = step_of(model, task=task)
    assert run_step(step, nan_image()).skipped is not None
    assert model[0].mean.count_nonzero() == 0
    assert run_step(step, good(1)).skipped is None
    assert len(model[0].seen) == 3


def test_a_group_without_samples_takes_its_step():
    assert run_step(step_of(conv_net().train()), batch(0), global_count=0.0).skipped is None


@pytest.mark.parametrize("rank", [0, 1])
def test_running_statistics_that_overflow_skip_the_step(rank):
    """The variance of activations around 1e20 does not fit, though loss and gradients do."""
    model = conv_net().train()
    with torch.no_grad():
        model[0].weight.mul_(1e20)
    before = copy.deepcopy(floats(model))
    comm = Rank(rank, 2, answers=[[..., None] if rank == 0 else [None, ...]])
    assert run_step(step_of(model, comm=comm), batch(4)).skipped == Skipped(rank=rank, source="batch norm")
    assert same(before, floats(model))


def test_a_step_is_printed_in_a_short_line():
    assert repr(step_of(nn.Linear(2, 2))) == "Step(Linear, SGD, fp32)"
