import copy
import math

import pytest
import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler
from torch.nn import functional

from hvdtrain import models
from hvdtrain.comm import SerialComm
from hvdtrain.step import TrainingStep

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


def step_for(model, *, sync=None, scaler=None, optimizer=None, **changes):
    settings = {"precision": "fp32", "label_smoothing": 0.0, "clip_value": None, "clip_norm": None, **changes}
    return TrainingStep(
        model=model,
        optimizer=optimizer or torch.optim.SGD(model.parameters(), lr=123.0),
        sync=sync or SerialComm().gradient_sync(model, compression="none"),
        scaler=scaler or GradScaler("cpu", enabled=False),
        **settings,
    )


def take(step, *micro_batches, global_count=None, lr=0.5):
    count = sum(len(labels) for _, labels in micro_batches) if global_count is None else global_count
    return step(iter(micro_batches), passes=len(micro_batches), global_count=count, lr=lr)


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
    done_whole = take(step_for(whole), (images, labels))
    done_parts = take(step_for(parts), *cut(images, labels, *sizes))
    assert_same_weights(parts, whole)
    torch.testing.assert_close(done_parts.loss_sum, done_whole.loss_sum, **CLOSE)
    assert done_parts.right == done_whole.right
    moved = max((one - two).abs().max() for one, two in zip(whole.parameters(), build().parameters(), strict=True))
    assert moved > 1e-3


@pytest.mark.parametrize("build", [small, tiny])
def test_fp32_steps_equal_a_plain_torch_loop(build):
    ours, plain = build().train(), build().train()
    step = step_for(ours, optimizer=torch.optim.SGD(ours.parameters(), lr=9.0, momentum=0.9))
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


class Recording:
    """A sync that keeps what it was told and the gradients at the end, or puts others in their place."""

    def __init__(self, model, gradients=None):
        self.model, self.gradients, self.calls = model, gradients, []

    def expect(self, backward_passes):
        assert all(parameter.grad is None for parameter in self.model.parameters())
        self.calls.append(("expect", backward_passes))

    def finish(self):
        self.calls.append(("finish",))
        if self.gradients is not None:
            for parameter, gradient in zip(self.model.parameters(), self.gradients, strict=True):
                parameter.grad = gradient.clone()
        self.found = [None if one.grad is None else one.grad.clone() for one in self.model.parameters()]


def test_ranks_gradients_add_up_to_those_of_the_mean_loss():
    images, labels = batch(7)
    found = []
    for part in [[(images, labels)], [(images[:5], labels[:5])], [(images[5:], labels[5:])]]:
        model = small().eval()
        sync = Recording(model)
        take(step_for(model, sync=sync), *part, global_count=7)
        found.append(sync.found)
    for whole, first, second in zip(*found, strict=True):
        torch.testing.assert_close(first + second, whole, **CLOSE)


@pytest.mark.parametrize(("sizes", "passes"), [((4,), 1), ((2, 2), 2), ((3, 1), 2)])
def test_sync_is_told_the_passes_before_the_first_and_finished_after_the_last(sizes, passes):
    model = small()
    sync = Recording(model)
    take(step_for(model, sync=sync), *cut(*batch(4), *sizes))
    assert sync.calls == [("expect", passes), ("finish",)]
    assert all(gradient is not None for gradient in sync.found)


def test_gradients_do_not_carry_over_to_the_next_step():
    model = small().eval()
    sync = Recording(model)
    step = step_for(model, sync=sync)
    take(step, batch(4), lr=0.0)
    first = sync.found
    take(step, batch(4), lr=0.0)
    for one, again in zip(first, sync.found, strict=True):
        assert torch.equal(one, again)


def test_rank_without_images_still_takes_the_others_step():
    model = small()
    before = copy.deepcopy(list(model.parameters()))
    sync = Recording(model, [torch.ones_like(parameter) for parameter in model.parameters()])
    done = take(step_for(model, sync=sync), global_count=2, lr=0.25)
    assert sync.calls == [("expect", 1), ("finish",)]
    assert (done.loss_sum, done.right, done.skipped) == (0, 0, False)
    for old, new in zip(before, model.parameters(), strict=True):
        assert torch.allclose(new, old - 0.25)


def change_of(gradient, **options):
    """What a step of SGD with rate 1 changes a weight by, when the sum over ranks is `gradient`."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 2 * 2, 10, bias=False))
    given = torch.zeros(10, 12)
    given[0, : len(gradient)] = torch.tensor(gradient)
    before = model[1].weight.detach().clone()
    take(step_for(model, sync=Recording(model, [given]), **options), batch(2, side=2), lr=1.0)
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
    take(step_for(model, sync=Recording(model, gradients), clip_norm=1.0), batch(2, side=2), lr=1.0)
    assert (before[1].weight - model[1].weight)[0, 0].item() == pytest.approx(0.6, abs=1e-5)
    assert (before[1].bias - model[1].bias)[0].item() == pytest.approx(0.8, abs=1e-5)


def test_clipping_sees_unscaled_gradients():
    scaler = GradScaler("cpu", enabled=True, init_scale=1024.0)
    scaled = [1024 * each for each in (3.0, -4.0, 0.5)]
    torch.testing.assert_close(change_of(scaled, scaler=scaler, clip_value=2.0), torch.tensor([2.0, -2.0, 0.5]))


def test_loss_sum_and_right_are_those_of_the_rank_images():
    model = small().eval()
    with torch.no_grad():
        model[5].bias.copy_(torch.arange(10.0))  # so that class 9 is always chosen
    images, _ = batch(5)
    labels = torch.tensor([9, 0, 9, 9, 3])
    with torch.no_grad():
        chances = torch.log_softmax(model(images), dim=1)
    done = take(step_for(model), *cut(images, labels, 3, 2), global_count=20)
    assert done.loss_sum.item() == pytest.approx(-sum(chances[i, label].item() for i, label in enumerate(labels)))
    assert done.right == 3
    assert done.skipped is False


def test_label_smoothing_takes_its_part_of_the_loss_over_all_classes():
    model = small().eval()
    images, labels = batch(4)
    with torch.no_grad():
        chances = torch.log_softmax(model(images), dim=1)
    done = take(step_for(model, label_smoothing=0.2), (images, labels))
    own = -chances.gather(1, labels[:, None]).sum()
    torch.testing.assert_close(done.loss_sum, 0.8 * own - 0.2 * chances.mean(1).sum(), **CLOSE)


@pytest.mark.parametrize("side", [16, 32])  # 16 pixels leave the tiny model 1 x 1 features
def test_single_image_trains_with_the_running_statistics(side):
    model = tiny().train()
    take(step_for(model), batch(8, side=side))
    running = copy.deepcopy(dict(model.named_buffers()))
    reference = copy.deepcopy(model).eval()
    images, labels = batch(1, seed=3, side=side)
    done = take(step_for(model), (images, labels))
    assert done.loss_sum.item() == pytest.approx(
        functional.cross_entropy(reference(images), labels).item(), rel=1e-4, abs=1e-5
    )
    assert all(torch.equal(value, running[name]) for name, value in model.named_buffers())
    assert all(layer.training for layer in model.modules())
    assert not torch.equal(model.classifier[1].weight, reference.classifier[1].weight)


def test_a_frozen_batch_norm_stays_frozen_after_a_single_image():
    model = small().train()
    model[1].eval()
    take(step_for(model), batch(1))
    assert not model[1].training
    assert model[0].training


def test_two_images_are_enough_for_batch_statistics():
    model = small().train()
    take(step_for(model), batch(2))
    assert model[1].num_batches_tracked == 1


@pytest.mark.parametrize(("precision", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_precision_is_the_one_the_layers_compute_in(precision, dtype):
    model, seen = small().train(), []
    model[0].register_forward_hook(lambda _layer, _inputs, output: seen.append(output.dtype))
    done = take(step_for(model, precision=precision), batch(4))
    assert seen == [dtype]
    assert done.loss_sum.dtype == torch.float32
    assert model[0].weight.dtype == model[0].weight.grad.dtype == torch.float32


@pytest.mark.parametrize("fused", [False, True])
def test_overflow_skips_the_step_and_lowers_the_scale(fused):
    model = small().train()
    scaler = GradScaler("cpu", enabled=True, init_scale=64.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, fused=fused)
    step = step_for(model, scaler=scaler, optimizer=optimizer)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    images, labels = batch(4)
    images[0, 0, 0, 0] = math.inf
    assert take(step, (images, labels)).skipped is True
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))
    assert scaler.get_scale() == 32.0


@pytest.mark.parametrize("fused", [False, True])
def test_loss_scale_does_not_change_the_step(fused):
    plain, scaled = small().train(), small().train()
    scaler = GradScaler("cpu", enabled=True, init_scale=1024.0)
    take(step_for(plain), batch(4))
    optimizer = torch.optim.SGD(scaled.parameters(), lr=1.0, fused=fused)
    done = take(step_for(scaled, scaler=scaler, optimizer=optimizer), batch(4))
    assert_same_weights(scaled, plain)
    assert done.skipped is False


def test_parameters_that_do_not_learn_are_left_alone():
    model = small()
    model[0].weight.requires_grad_(False)
    before = model[0].weight.clone()
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    take(step_for(model, optimizer=torch.optim.SGD(learning, lr=1.0), clip_norm=1.0, clip_value=1.0), batch(4))
    assert torch.equal(model[0].weight, before)
    assert model[0].weight.grad is None
