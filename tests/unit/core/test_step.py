import copy
import math
import weakref

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from hvdtrain.core.finite import SUM, Skipped
from hvdtrain.core.slots import EveryStep, Layout, Parts, Witness
from hvdtrain.core.step import Step
from hvdtrain.core.task import Sums
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.vision import models
from hvdtrain.witnesses.find_nan import FindNan
from tests.ranks import Rank, together
from tests.steps import step_of, take

# Sums of the same numbers in another order differ in the last bits of float32; a gradient that is wrong by one image
# in eight differs by a tenth.
CLOSE = {"rtol": 1e-4, "atol": 1e-6}


def tiny():
    torch.manual_seed(0)
    return models.build("efficientnet_tiny", classes=10, dropout=0.0, stochastic_depth=0.0)


def small():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 10)
    )


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


@pytest.mark.parametrize("build", [small, tiny])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 2, 2, 2), (3, 3, 2), (5, 3), (7, 1)])
def test_micro_batches_make_the_step_of_the_whole_batch(build, sizes):
    whole, parts = build().eval(), build().eval()  # batch norm in eval mode: its statistics depend on the batch
    images, labels = batch(8)
    done_whole = take(step_of(whole), (images, labels))
    done_parts = take(step_of(parts), *cut(images, labels, *sizes))
    assert_same_weights(parts, whole)
    torch.testing.assert_close(done_parts.totals["loss"], done_whole.totals["loss"], **CLOSE)
    assert done_parts.totals["right"] == done_whole.totals["right"]
    moved = max((one - two).abs().max() for one, two in zip(whole.parameters(), build().parameters(), strict=True))
    assert moved > 1e-3


@pytest.mark.parametrize("build", [small, tiny])
def test_fp32_steps_equal_a_plain_torch_loop(build):
    ours, plain = build().train(), build().train()
    step = step_of(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=9.0, momentum=0.9))
    optimizer = torch.optim.SGD(plain.parameters(), lr=9.0, momentum=0.9)
    for number, lr in enumerate((0.01, 0.02, 0.005)):
        images, labels = batch(16, seed=number)
        take(step, (images, labels), lr=lr)
        optimizer.zero_grad()
        nn.functional.cross_entropy(plain(images), labels).backward()
        for group in optimizer.param_groups:
            group["lr"] = lr
        optimizer.step()
    assert_same_weights(ours, plain)
    for (name, one), other in zip(ours.named_buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5, msg=lambda text, name=name: f"{name}: {text}")


class Recording(GradientSync):
    """A sync that keeps what it was told and the gradients at the end, or puts others in their place."""

    def __init__(self, model, gradients=None):
        self.model, self.gradients, self.calls, self.overflows = model, gradients, [], []

    def expect(self, backward_passes):
        assert all(parameter.grad is None for parameter in self.model.parameters())
        self.calls.append(("expect", backward_passes))

    def finish(self):
        self.calls.append(("finish",))
        if self.gradients is not None:
            for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
                parameter.grad = gradient.clone()
        self.found = [None if one.grad is None else one.grad.clone() for one in self.model.parameters()]

    def end_step(self, *, overflowed):
        self.overflows.append(overflowed)


@pytest.mark.parametrize(("device", "ranks", "overlaps"), [("cuda", 2, False), ("cuda", 1, True), ("cpu", 2, True)])
def test_sums_wait_for_backward_if_the_parts_of_a_replica_talk_over_nccl_too(monkeypatch, device, ranks, overlaps):
    model = small()
    sync, where = Recording(model), Layout()
    where.ranks = ranks
    step = step_of(model, sync=sync, where=where, witnesses=[])
    monkeypatch.setattr(Step, "device", torch.device(device))
    take(step, batch(4))
    assert sync.overlap == overlaps


def test_ranks_gradients_add_up_to_those_of_the_mean_loss():
    images, labels = batch(7)
    found = []
    for part in [[(images, labels)], [(images[:5], labels[:5])], [(images[5:], labels[5:])]]:
        model = small().eval()
        sync = Recording(model)
        take(step_of(model, sync=sync), *part, global_count=7)
        found.append(sync.found)
    for whole, first, second in zip(*found, strict=True):
        torch.testing.assert_close(first + second, whole, **CLOSE)


@pytest.mark.parametrize(("sizes", "passes"), [((4,), 1), ((2, 2), 2), ((3, 1), 2)])
def test_sync_is_told_the_passes_before_the_first_and_finished_after_the_last(sizes, passes):
    model = small()
    sync = Recording(model)
    take(step_of(model, sync=sync), *cut(*batch(4), *sizes))
    assert sync.calls == [("expect", passes), ("finish",)]
    assert all(gradient is not None for gradient in sync.found)


def test_gradients_do_not_carry_over_to_the_next_step():
    model = small().eval()
    sync = Recording(model)
    step = step_of(model, sync=sync)
    take(step, batch(4), lr=0.0)
    first = sync.found
    take(step, batch(4), lr=0.0)
    for one, again in zip(first, sync.found, strict=True):
        assert torch.equal(one, again)


@pytest.mark.parametrize("build", [small, tiny])
@pytest.mark.parametrize("passes", [1, 2])
def test_rank_without_images_still_takes_the_others_step(build, passes):
    model = build().train()
    before = copy.deepcopy(list(model.parameters()))
    statistics = copy.deepcopy(list(model.buffers()))
    sync = Recording(model, [torch.ones_like(parameter) for parameter in model.parameters()])
    done = take(step_of(model, sync=sync), *[batch(0)] * passes, global_count=2, lr=0.25)
    assert sync.calls == [("expect", passes), ("finish",)]
    assert (done.totals["loss"], done.totals["right"], done.skipped) == (0, 0, None)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(new, old - 0.25)
    assert all(torch.equal(old, new) for old, new in zip(statistics, model.buffers(), strict=True))


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_empty_micro_batch_adds_gradients_of_zero(precision):
    model = tiny().train().to(memory_format=torch.channels_last)
    sync = Recording(model)
    empty, labels = batch(0)
    step = step_of(model, sync=sync, precision=precision, label_smoothing=0.1)
    done = take(step, (empty.contiguous(memory_format=torch.channels_last), labels), global_count=2)
    assert (done.totals["loss"], done.totals["right"], done.skipped) == (0, 0, None)
    assert all(gradient is not None and not gradient.any() for gradient in sync.found)


def test_an_empty_micro_batch_beside_others_changes_nothing():
    alone, beside = small().train(), small().train()
    images, labels = batch(4)
    take(step_of(alone), (images, labels))
    take(step_of(beside), (images, labels), batch(0))
    assert all(torch.equal(one, other) for one, other in zip(floats(alone), floats(beside), strict=True))


def change_of(gradient, **options):
    """What a step of SGD with rate 1 changes a weight by, when the sum over ranks is `gradient`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 2, 10, bias=False))
    given = torch.zeros(10, 12)
    given[0, : len(gradient)] = torch.tensor(gradient)
    before = model[1].weight.detach().clone()
    take(step_of(model, sync=Recording(model, [given]), **options), batch(2, side=2), lr=1.0)
    return (before - model[1].weight.detach())[0, : len(gradient)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [3.0, -4.0, 0.5]),
        ({"clip_value": 1.0}, [1.0, -1.0, 0.5]),
        ({"clip_norm": 1.0}, [each / math.sqrt(25.25) for each in (3.0, -4.0, 0.5)]),
        ({"clip_value": 1.0, "clip_norm": 1.0}, [2 / 3, -2 / 3, 1 / 3]),  # norm first would give 0.60, -0.80, 0.10
        ({"clip_value": 10.0, "clip_norm": 10.0}, [3.0, -4.0, 0.5]),
    ],
)
def test_the_sum_is_clipped_by_value_and_then_by_norm(options, expected):
    torch.testing.assert_close(change_of([3.0, -4.0, 0.5], **options), torch.tensor(expected), rtol=1e-5, atol=1e-6)


def test_the_norm_is_that_of_all_parameters_together():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    gradients = [torch.zeros(10, 12), torch.zeros(10)]
    gradients[0][0, 0], gradients[1][0] = 3.0, 4.0
    before = copy.deepcopy(model)
    take(step_of(model, sync=Recording(model, gradients), clip_norm=1.0), batch(2, side=2), lr=1.0)
    assert (before[1].weight - model[1].weight)[0, 0].item() == pytest.approx(0.6, abs=1e-5)
    assert (before[1].bias - model[1].bias)[0].item() == pytest.approx(0.8, abs=1e-5)


def test_clipping_sees_unscaled_gradients():
    scaler = GradScaler("cpu", enabled=True, init_scale=1024.0)
    scaled = [1024 * each for each in (3.0, -4.0, 0.5)]
    torch.testing.assert_close(change_of(scaled, scaler=scaler, clip_value=2.0), torch.tensor([2.0, -2.0, 0.5]))


@pytest.mark.parametrize("clips", [{}, {"clip_value": 1.0}, {"clip_norm": 1.0}])
@pytest.mark.parametrize("scale", [None, 1024.0])
def test_the_measured_norm_is_that_of_the_unscaled_gradients_before_clipping(clips, scale):
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    gradients = [torch.zeros(10, 12), torch.zeros(10)]
    gradients[0][0, 0], gradients[1][0] = 3.0 * (scale or 1.0), 4.0 * (scale or 1.0)
    scaler = GradScaler("cpu", enabled=True, init_scale=scale) if scale else None
    step = step_of(model, sync=Recording(model, gradients), scaler=scaler, **clips)
    images, labels = batch(2, side=2)
    assert math.isnan(take(step, (images, labels)).grad_norm)  # not asked for
    done = take(step, (images, labels), lr=1.0, measure=True)
    assert done.grad_norm == pytest.approx(5.0)


def test_loss_sum_and_right_are_those_of_the_rank_images():
    model = small().eval()
    with torch.no_grad():
        model[5].bias.copy_(torch.arange(10.0))  # so that class 9 is always chosen
    images, _ = batch(5)
    labels = torch.tensor([9, 0, 9, 9, 3])
    with torch.no_grad():
        chances = torch.log_softmax(model(images), dim=1)
    done = take(step_of(model), *cut(images, labels, 3, 2), global_count=20)
    assert isinstance(done.totals["loss"], float)
    assert done.totals["loss"] == pytest.approx(-sum(chances[i, label].item() for i, label in enumerate(labels)))
    assert done.totals["right"] == 3
    assert done.skipped is None


def test_label_smoothing_takes_its_part_of_the_loss_over_all_classes():
    model = small().eval()
    images, labels = batch(4)
    with torch.no_grad():
        chances = torch.log_softmax(model(images), dim=1)
    done = take(step_of(model, label_smoothing=0.2), (images, labels))
    own = -chances.gather(1, labels[:, None]).sum()
    assert done.totals["loss"] == pytest.approx((0.8 * own - 0.2 * chances.mean(1).sum()).item(), rel=1e-4)


@pytest.mark.parametrize("side", [16, 32])  # 16 pixels leave the tiny model 1 x 1 features
def test_single_image_trains_with_the_running_statistics(side):
    model = tiny().train()
    take(step_of(model), batch(8, side=side))
    running = copy.deepcopy(dict(model.named_buffers()))
    reference = copy.deepcopy(model).eval()
    images, labels = batch(1, seed=3, side=side)
    done = take(step_of(model), (images, labels))
    assert done.totals["loss"] == pytest.approx(
        functional.cross_entropy(reference(images), labels).item(), rel=1e-4, abs=1e-5
    )
    assert all(torch.equal(value, running[name]) for name, value in model.named_buffers())
    assert all(layer.training for layer in model.modules())
    assert not torch.equal(model.classifier[1].weight, reference.classifier[1].weight)


def test_a_frozen_batch_norm_stays_frozen_after_a_single_image():
    model = small().train()
    model[1].eval()
    take(step_of(model), batch(1))
    assert not model[1].training
    assert model[0].training


def test_two_images_are_enough_for_batch_statistics():
    model = small().train()
    take(step_of(model), batch(2))
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_the_one_the_layers_compute_in(monkeypatch, precision, dtype):
    model, seen = small().train(), []
    model[0].register_forward_hook(lambda _layer, _inputs, output: seen.append(output.dtype))
    plain = functional.cross_entropy

    def watched(logits, *rest, **options):
        loss = plain(logits, *rest, **options)
        seen.extend([logits.dtype, loss.dtype])
        return loss

    monkeypatch.setattr(functional, "cross_entropy", watched)
    take(step_of(model, precision=precision), batch(4))
    assert seen == [dtype, torch.float32, torch.float32]
    assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step_and_lowers_the_scale(fused):
    model = small().train()
    scaler = GradScaler("cpu", enabled=True, init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=fused)
    step = step_of(model, scaler=scaler, optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images, labels = batch(4)
    images[0, 0, 0, 0] = math.inf
    assert take(step, (images, labels)).skipped == Skipped(rank=0, source="loss")
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 32.0
    assert take(step, batch(4)).skipped is None
    assert not any(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 32.0


class OfTwo(Parts):
    """The first of two parts, which computes no loss, or the last one."""

    part = "part"

    def __init__(self, comm, *, is_last):
        super().__init__(comm, set())
        self._is_last = is_last

    def train(self, step, batches, count, global_count):
        [images] = (one["images"] for one in batches)
        outputs = step.model(images)
        if self._is_last:
            step.record_loss(Sums(loss=outputs.sum(), count=torch.ones(())), global_count).backward()
        else:
            step.hand_on(outputs).backward(torch.full_like(outputs, 64.0))


@pytest.mark.parametrize("is_last", [False, True])
@pytest.mark.parametrize("bad", [0, 1, None])
def test_what_is_not_finite_in_one_part_of_a_replica_lowers_the_scale_in_all(is_last, bad):
    whole = small().train()  # two threads draw from one generator

    def program(comm):
        model = copy.deepcopy(whole)
        scaler = GradScaler("cpu", enabled=True, init_scale=64.0)
        step = step_of(model, comm=comm, where=OfTwo(comm, is_last=is_last), scaler=scaler, witnesses=[])
        before = [parameter.detach().clone() for parameter in model.parameters()]
        images, labels = batch(4)
        if comm.rank == bad:
            model[5].bias.register_hook(lambda gradient: gradient * math.inf)
        skipped = take(step, (images, labels)).skipped
        kept = [torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True)]
        return scaler.get_scale(), all(kept), None if skipped is None else skipped.source

    one = (64.0, False, None) if bad is None else (32.0, True, f"{SUM} of part {bad}")
    assert together(2, program) == [one, one]


@pytest.mark.parametrize("name", optim.BUILD)
def test_loss_scale_does_not_change_the_step(name):
    models = small().train(), small().train()
    for model, is_scaled in zip(models, (False, True), strict=True):
        optimizer = optim.BUILD[name](optim.parameter_groups(model, 5e-4, decay_all=False), 0.1)
        scaler = GradScaler("cpu", enabled=is_scaled, init_scale=1024.0)
        step = step_of(model, scaler=scaler, optimizer=optimizer)
        for number in range(3):
            assert take(step, batch(4, seed=number), lr=0.1).skipped is None
    assert_same_weights(*models)


def test_parameters_that_do_not_learn_are_left_alone():
    model = small()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    take(step_of(model, optimizer=torch.optim.SGD(learning, lr=1.0), clip_norm=1.0, clip_value=1.0), batch(4))
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None


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


class InfiniteLoss(nn.Module):
    """A model that rules out class 9: its loss for label 9 is infinite, the gradients (softmax - target) are not."""

    def __init__(self, body):
        super().__init__()
        self.body = body
        self.offset = torch.tensor([0.0] * 9 + [-math.inf])

    def forward(self, images):
        return self.body(images) + self.offset


def nan_image(count=8):
    images, labels = batch(count, seed=5)
    images[3, 1, 2, 2] = math.nan
    return images, labels


def bad_gradient(count=8):
    images, labels = batch(count, seed=5)
    images[0, 0, 0, 0] = 0.0
    return images, labels


def label_nine(count=8):
    images, labels = batch(count, seed=5)
    labels[labels == 9] = 0
    labels[3] = 9
    return images, labels


def good(number, count=8):
    images, labels = batch(count, seed=100 + number)
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


def same(one, other):
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def optimizer_for(name, model):
    return optim.BUILD[name](optim.parameter_groups(model, 5e-4, decay_all=False), 0.01)


def test_label_nine_has_an_infinite_loss_and_finite_gradients():
    model = InfiniteLoss(small())
    images, labels = label_nine()
    loss = functional.cross_entropy(model(images), labels)
    loss.backward()
    assert loss == math.inf
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters())


@BAD
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", "adam", "adamw", "lars", "lamb"])
@pytest.mark.parametrize("sizes", [(8,), (3, 3, 2)])
def test_a_step_that_is_not_finite_changes_nothing(wrap, bad, source, optimizer, sizes):
    model = wrap(small()).train()
    step = step_of(model, optimizer=optimizer_for(optimizer, model), clip_value=1.0, clip_norm=1.0)
    assert take(step, *cut(*good(1), *sizes), lr=0.01).skipped is None
    before, state = copy.deepcopy(floats(model)), state_of(step.optimizer)
    done = take(step, *cut(*bad(), *sizes), lr=0.01)
    assert done.skipped == Skipped(rank=0, source=source)
    assert math.isfinite(done.totals["loss"]) == (source == "gradients")
    assert all(torch.equal(old, new) for old, new in zip(before, floats(model), strict=True))
    assert all(torch.isfinite(one).all() for one in floats(model))
    assert same(state, state_of(step.optimizer))
    assert model.training
    assert all(layer.training for layer in model.modules())


@BAD
@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lamb"])
def test_the_step_after_a_skipped_one_is_the_one_without_it(wrap, bad, source, optimizer):
    found = []
    for batches in ([good(1), bad(), good(2), good(3)], [good(1), good(2), good(3)]):
        model = wrap(small()).train()
        average = MovingAverage(model, horizon_steps=50.0)
        step = step_of(model, optimizer=optimizer_for(optimizer, model), average=average)
        done = [take(step, one, lr=0.01) for one in batches]
        assert [one.skipped for one in done if one.skipped] == [Skipped(rank=0, source=source)] * (len(batches) - 3)
        weights = [*floats(model), *floats(average), average.n_averaged]
        found.append((weights, state_of(step.optimizer), [one.totals["loss"] for one in done[-2:]]))
    assert same(*found)


@BAD
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_halves_the_loss_scale_and_the_next_one_is_taken(wrap, bad, source, fused):
    model = wrap(small()).train()
    scaler = GradScaler("cpu", enabled=True, init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=fused)
    step = step_of(model, scaler=scaler, optimizer=optimizer)
    scales, skipped = [], []
    for number, micro_batch in enumerate([good(0), bad(), bad(), good(1)]):
        before = copy.deepcopy(floats(model))
        skipped.append(take(step, micro_batch, lr=0.01).skipped)
        scales.append(scaler.get_scale())
        unchanged = all(torch.equal(old, new) for old, new in zip(before, floats(model), strict=True))
        assert unchanged == (number in (1, 2))
    assert skipped == [None, Skipped(rank=0, source=source), Skipped(rank=0, source=source), None]
    assert scales == [64.0, 32.0, 16.0, 16.0]


@pytest.mark.parametrize("scale", [3e38, 4.69e36])  # at half of the second one nothing overflows
def test_a_loss_scale_that_overflows_is_the_gradients_fault(scale):
    model = small().train()
    scaler = GradScaler("cpu", enabled=True, init_scale=scale)
    with torch.no_grad():
        model[5].bias[0] = 100.0  # the loss's gradient at the logits is close to 1, the weights' sum overflows
    images, _ = batch(8)
    step = step_of(model, scaler=scaler)
    assert take(step, (100 * images, torch.ones(8, dtype=torch.int64)), global_count=1).skipped == Skipped(
        rank=0, source="gradients"
    )
    assert scaler.get_scale() == pytest.approx(scale / 2)


def skip_with(comm, gradients=None, micro_batch=None):
    """A step of this rank in which the sum over ranks is not finite."""
    model = InfiniteGradient(small()).train()
    bad = gradients or [torch.full_like(one, math.nan) for one in model.parameters()]
    before = copy.deepcopy(floats(model))
    step = step_of(model, comm=comm, sync=Recording(model, bad))
    done = take(step, micro_batch or good(1), global_count=24)
    assert all(torch.equal(old, new) for old, new in zip(before, floats(model), strict=True))
    assert comm.answers == []
    return done.skipped


@pytest.mark.parametrize(
    ("rank", "losses", "first"),
    [
        (0, [..., None, "loss"], 2),
        (0, [..., "loss", "loss"], 1),
        (2, ["loss", "loss", ...], 0),
        (1, [None, ..., "loss"], 2),
    ],
)
def test_the_first_rank_whose_loss_was_not_finite_is_named(rank, losses, first):
    comm = Rank(rank, 3, answers=[losses])
    assert skip_with(comm) == Skipped(rank=first, source="loss")
    assert comm.said == [None]


def test_this_rank_tells_the_others_of_its_loss():
    comm = Rank(1, 3, answers=[[None, ..., "loss"]])
    assert skip_with(comm, micro_batch=nan_image()) == Skipped(rank=1, source="loss")
    assert comm.said == ["loss"]


@pytest.mark.parametrize(
    ("rank", "gradients", "micro_batch", "first"),
    [
        (0, [..., False, True], good(1), 2),
        (0, [..., True, True], good(1), 1),
        (2, [False, False, ...], bad_gradient(), 2),
        (1, [True, ..., False], bad_gradient(), 0),
        (1, [False, ..., True], bad_gradient(), 1),
        (1, [False, ..., True], batch(0), 2),
    ],
)
def test_the_first_rank_whose_gradients_were_not_finite_is_named(rank, gradients, micro_batch, first):
    comm = Rank(rank, 3, answers=[[None] * rank + [...] + [None] * (2 - rank), gradients])
    assert skip_with(comm, micro_batch=micro_batch) == Skipped(rank=first, source="gradients")
    assert comm.said == [None, bool(len(micro_batch[1])) and micro_batch[0][0, 0, 0, 0].item() == 0]


class LastTwo(EveryStep):
    """The last two of four ranks step together."""

    def __init__(self, group):
        self._group = group

    def step_group(self, comm):
        return self._group


@pytest.mark.parametrize(("answers", "source"), [([[..., "loss"]], "loss"), ([[..., None], [..., True]], "gradients")])
def test_a_rank_of_a_later_group_is_named_by_its_number_among_all(answers, source):
    model = InfiniteGradient(small()).train()
    bad = [torch.full_like(one, math.nan) for one in model.parameters()]
    when = LastTwo(Rank(0, 2, answers=answers))
    step = step_of(model, comm=Rank(2, 4), when=when, sync=Recording(model, bad))
    assert take(step, good(1), global_count=24).skipped == Skipped(rank=3, source=source, ranks="ranks 2 to 3")


def test_what_one_witness_has_found_outlives_another_that_finds_nothing():
    step = step_of(InfiniteGradient(small()).train(), witnesses=[FindNan(), Witness()])
    assert take(step, bad_gradient()).skipped == Skipped(rank=0, source="gradients")


def test_a_parameter_that_an_earlier_part_counts_is_left_out_of_the_norm():
    own, tied = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    own.grad, tied.grad = torch.tensor([3.0]), torch.tensor([4.0])
    assert Parts(SerialComm(), {id(tied)}).norm([[own, tied]]).item() == 3
    assert Parts(SerialComm(), set()).norm([[own, tied]]).item() == 5


@pytest.mark.parametrize(
    ("others", "micro_batch", "source"),
    [
        (False, good(1), SUM),  # finite on each rank, but not their sum
        (True, good(1), "gradients"),
        (False, bad_gradient(), "gradients"),
    ],
)
@pytest.mark.parametrize("scaled", [True, False])
def test_loss_scale_and_wire_hear_of_every_sum_that_is_not_finite(others, micro_batch, source, scaled):
    comm = Rank(0, 2, answers=[[..., None], [..., others]])
    model = InfiniteGradient(small()).train()
    sync = Recording(model)
    scaler = GradScaler("cpu", enabled=scaled, init_scale=64.0)
    step = step_of(model, comm=comm, sync=sync, scaler=scaler)
    assert take(step, good(2), global_count=16).skipped is None
    sync.gradients = [torch.full_like(one, math.inf) for one in model.parameters()]
    done = take(step, micro_batch, global_count=16)
    assert done.skipped is not None
    assert done.skipped.source == source
    sync.gradients = None
    assert take(step, good(3), global_count=16).skipped is None
    assert sync.overflows == [False, source == SUM, False]
    assert scaler.get_scale() == (32.0 if scaled else 1.0)


def test_of_a_sum_that_is_not_finite_rank_0_stands_for_all():
    comm = Rank(1, 3, answers=[[None, ..., None], [False, ..., False]])
    assert skip_with(comm) == Skipped(rank=None, source=SUM)


@pytest.mark.parametrize(
    ("micro_batch", "others", "found"),
    [
        (good(1), None, Skipped(rank=None, source=SUM)),
        (bad_gradient(), None, Skipped(rank=None, source=SUM)),
        (bad_gradient(), "loss", Skipped(rank=1, source="loss")),
        (nan_image(), "loss", Skipped(rank=0, source="loss")),
    ],
)
def test_unless_asked_nobody_looks_for_gradients_a_second_time(micro_batch, others, found):
    comm = Rank(0, 2, answers=[[..., others]])
    model = InfiniteGradient(small()).train()
    forwards = []
    model.register_forward_hook(lambda *_: forwards.append(1))
    bad = [torch.full_like(one, math.nan) for one in model.parameters()]
    before = copy.deepcopy(floats(model))
    done = take(step_of(model, comm=comm, sync=Recording(model, bad), witnesses=[]), micro_batch, global_count=16)
    assert done.skipped == found
    assert len(forwards) == 1
    assert all(torch.equal(old, new) for old, new in zip(before, floats(model), strict=True))


@pytest.mark.parametrize("name", ["sgd", "adam", "adamw"])
def test_a_skipped_first_step_leaves_the_optimizer_as_it_began(name):
    """torch's fused SGD takes uninitialised memory for the momentum of a first step that it skips."""
    found = []
    for batches in ([nan_image(), good(1), good(2)], [good(1), good(2)]):
        model = small().train()
        step = step_of(model, optimizer=optimizer_for(name, model))
        skipped = [take(step, one, lr=0.01).skipped is not None for one in batches]
        assert skipped == [True, False, False][-len(batches) :]
        found.append((floats(model), state_of(step.optimizer)))
    assert same(*found)


def test_a_good_step_asks_the_other_ranks_nothing():
    comm = Rank(1, 2, answers=[[None, None]])
    assert take(step_of(small(), comm=comm), batch(4)).skipped is None
    assert comm.said == []


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize(
    "options", [{}, {"clip_value": 1.0}, {"clip_norm": 1.0}, {"clip_value": 1.0, "clip_norm": 1.0}]
)
def test_one_element_of_the_sum_is_enough_and_clipping_does_not_hide_it(value, options):
    assert change_of([3.0, value, 0.5], **options).tolist() == [0.0, 0.0, 0.0]


def test_large_gradients_whose_norm_overflows_are_finite_and_clipped_by_value_first():
    # The square of 1e30 is infinite, so a check of the usual norm would skip this step.
    torch.testing.assert_close(
        change_of([1e30, -1e30, 0.5], clip_value=1.0, clip_norm=1.0), torch.tensor([2 / 3, -2 / 3, 1 / 3])
    )


class DroppedFirst(nn.Module):
    """Features of which the gradient is infinite where dropout dropped the first one of the batch."""

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)
        self.masks = []

    def forward(self, features):
        kept = self.dropout(torch.ones_like(features))
        self.masks.append(kept.detach())
        return Faulty.apply(features * kept, math.inf if kept[0, 0] == 0 else 1.0)


def test_gradients_are_taken_again_with_the_same_dropout():
    """The mask of the second micro-batch alone makes them infinite; new masks would not."""

    def first_ones(seed):
        torch.manual_seed(seed)
        return [nn.functional.dropout(torch.ones(4, 8), 0.5)[0, 0].item() for _ in range(4)]

    seed = next(seed for seed in range(1000) if [one == 0 for one in first_ones(seed)] == [False, True, False, False])
    model = nn.Sequential(*small()[:5], DroppedFirst(), nn.Linear(8, 10)).train()
    comm = Rank(1, 2, answers=[[None, ...], [False, ...]])
    step = step_of(model, comm=comm)
    torch.manual_seed(seed)
    done = take(step, *cut(*batch(8), 4, 4))
    assert done.skipped == Skipped(rank=1, source="gradients")
    assert comm.said == [None, True]
    first, second, again = model[5].masks
    assert not torch.equal(first, second)
    assert torch.equal(again, second)


@pytest.mark.parametrize("place", [0, 1, 2])
def test_gradients_that_are_not_finite_are_found_in_whichever_pass(place):
    batches = [good(1), good(2), good(3)]
    batches[place] = bad_gradient()
    comm = Rank(1, 2, answers=[[None, ...], [False, ...]])
    done = take(step_of(InfiniteGradient(small()).train(), comm=comm), *batches)
    assert done.skipped == Skipped(rank=1, source="gradients")
    assert comm.said == [None, True]


def test_accumulation_frees_each_micro_batch_before_it_takes_the_next_but_one():
    alive, most = [], []

    def micro_batches():
        for number in range(16):
            images, labels = good(number)
            alive.append(weakref.ref(images))
            most.append(sum(one() is not None for one in alive))
            yield {"images": images, "labels": labels}
            del images, labels

    step_of(small().train(), witnesses=[])(micro_batches(), backward_passes=16, global_count=64, lr=0.1)
    assert max(most) <= 2


@BAD
def test_a_skipped_step_draws_as_many_random_numbers_as_a_taken_one(wrap, bad, source):
    after, sources = [], []
    for micro_batch in (good(1), bad()):
        model = wrap(nn.Sequential(*small()[:5], nn.Dropout(0.5), nn.Linear(8, 10))).train()
        torch.manual_seed(1)
        skipped = take(step_of(model), micro_batch).skipped
        sources.append(skipped and skipped.source)
        after.append(torch.get_rng_state())
    assert sources == [None, source]
    assert torch.equal(*after)


def test_finding_the_source_leaves_the_gradients_to_the_next_step():
    model = InfiniteGradient(small()).train()
    sync = Recording(model)
    step = step_of(model, sync=sync)
    take(step, bad_gradient())
    take(step, good(1))
    assert sync.calls == [("expect", 1), ("finish",)] * 2
    assert all(torch.isfinite(gradient).all() for gradient in sync.found)


@pytest.mark.parametrize("rank", [0, 1])
def test_running_statistics_that_overflow_skip_the_step(rank):
    """The variance of activations around 1e20 does not fit, though loss and gradients do."""
    model = small().train()
    with torch.no_grad():
        model[0].weight.mul_(1e20)
    before = copy.deepcopy(model.state_dict())
    comm = Rank(rank, 2, answers=[[..., None] if rank == 0 else [None, ...]])
    assert take(step_of(model, comm=comm), batch(4)).skipped == Skipped(rank=rank, source="batch norm")
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            assert torch.equal(value, before[name])


def test_losses_near_the_limit_of_float32_are_summed():
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 10))
    with torch.no_grad():
        model[1].weight.zero_()
        model[1].bias.zero_()
        model[1].bias[0] = -3e38
    images, _ = batch(2, side=2)
    parts = cut(images, torch.tensor([0, 0]), 1, 1)
    done = take(step_of(model), *parts)
    assert done.skipped is None
    assert done.totals["loss"] == pytest.approx(6e38, rel=1e-6)
