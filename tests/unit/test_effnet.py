import math
from dataclasses import replace

import pytest
import torch

from hvdtrain.core.model.batch_norm import layers
from hvdtrain.core.position import Position
from hvdtrain.insight.profiling.trace import BEFORE_STEPS
from hvdtrain.loop.feed.order import batch_sizes
from hvdtrain.parallel.sync import reducers
from hvdtrain.program.checks import require_batches
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe.settings import OPTIMIZERS
from hvdtrain.recipe.sync_batch_norm import SyncBatchNorm2d
from hvdtrain.tasks.vision import settings as vision_settings
from hvdtrain.tasks.vision.data import load_on_all
from tests.ranks import Rank
from tests.refusals import refused, require_facts
from tests.steps import required_sizes
from tests.unit.loop.trainings import begun

DIGITS = replace(vision_settings.scaled(), data="digits", model="efficientnet_tiny", batch_size_per_rank=64)


def assembled(ranks=1, **changes):
    images = load_on_all(SerialComm(), DIGITS)
    return begun(Rank(0, ranks), images=images, settings=DIGITS, **changes)


@pytest.mark.parametrize(
    ("batch", "accumulate", "named"),
    [
        (2000, 1, "--batch-size-per-rank 2000 is more than a rank's share"),
        (500, 4, "--batch-size-per-rank 500 x --accumulate-steps 4 is more than a rank's share"),
    ],
)
def test_a_batch_larger_than_the_rank_share_is_refused(batch, accumulate, named):
    settings = replace(DIGITS, batch_size_per_rank=batch, accumulate_steps=accumulate)
    assert refused(lambda: require_batches(settings, train=1438, test=359, ranks=1, unit="images")).startswith(named)


@pytest.mark.parametrize(("traced", "least"), [(None, 24), (2, 28)])
def test_a_run_too_short_for_two_passes_is_refused(traced, least):
    settings = replace(DIGITS, batch_size_per_rank=100, profile="exact", torch_profile=traced)

    def sizes(steps):
        return required_sizes(replace(settings, epochs=steps // 2), train=200)

    line = refused(lambda: sizes(least - 2))
    require_facts(line, f"--profile exact ... {least} steps ... {least - 2} ... --epochs")
    assert sizes(least).steps_per_epoch == 2


def test_what_is_measured_must_fit_into_max_steps_whatever_the_epochs():
    settings, steps = replace(DIGITS, batch_size_per_rank=100, epochs=99, torch_profile=30), 30 + BEFORE_STEPS
    line = refused(lambda: required_sizes(settings, train=200, max_steps=steps - 1))
    require_facts(line, f"{steps - 1} ... --max-steps")
    assert "--epochs" not in line
    required_sizes(settings, train=200, max_steps=steps)


GLOBAL_64 = {"batch_size_per_rank": 256, "global_batch_size": 64}


@pytest.mark.parametrize(
    ("ranks", "changes", "micro_batch", "global_batch"),
    [
        (4, GLOBAL_64, 16, 64),
        (1, GLOBAL_64, 64, 64),
        (4, {**GLOBAL_64, "accumulate_steps": 2}, 8, 64),
        (4, {"batch_size_per_rank": 16, "accumulate_steps": 2}, 16, 128),
    ],
)
def test_the_global_batch_is_shared_by_ranks_and_passes(ranks, changes, micro_batch, global_batch):
    training = assembled(ranks, **changes)
    sizes = training.feed.sizes
    assert (sizes.micro_batch, sizes.global_batch) == (micro_batch, global_batch)
    assert sizes.steps_per_epoch == math.ceil(len(training.images.train) / global_batch)
    first = next(iter(training.feed.batches(Position())))
    assert len(first.indices) == changes.get("accumulate_steps", 1)
    batch = len(training.images.train) / sizes.steps_per_epoch
    assert training.lr.peak == pytest.approx(OPTIMIZERS["sgd"].base_lr * batch / 256)


@pytest.mark.parametrize(
    ("size", "ranks", "accumulate", "near"),
    [(50, 4, 1, 48), (51, 4, 1, 52), (2, 4, 1, 4), (64, 4, 3, 60)],
)
def test_a_global_batch_that_the_ranks_do_not_divide_is_refused_with_one_that_they_do(size, ranks, accumulate, near):
    settings = replace(DIGITS, batch_size_per_rank=256, global_batch_size=size, accumulate_steps=accumulate)
    message = refused(lambda: batch_sizes(settings, samples=1438, ranks=ranks))
    require_facts(
        message, f"--global-batch-size {size} ... {ranks} ranks ... --accumulate-steps {accumulate} ... {near}"
    )
    found = batch_sizes(replace(settings, global_batch_size=near), samples=1438, ranks=ranks)
    assert found.micro_batch * ranks * accumulate == found.global_batch == near


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(1, {"batch_size_per_rank": 1}), (4, {"batch_size_per_rank": 256, "global_batch_size": 4})],
)
def test_sync_bn_with_one_image_per_rank_is_refused(ranks, changes):
    settings = replace(DIGITS, sync_bn=True, **changes)
    message = refused(lambda: required_sizes(settings, train=60, test=4, ranks=ranks))
    require_facts(message, "--sync-bn ... batch of 1 ... at least 2")
    sizes = required_sizes(replace(settings, sync_bn=False), train=60, test=4, ranks=ranks)
    assert sizes.micro_batch == 1


# --- what the script puts together


@pytest.mark.parametrize("sync_bn", [False, True])
def test_batch_norm_is_over_all_ranks_if_asked_for(sync_bn):
    training = assembled(2, sync_bn=sync_bn, ema_epochs=1.0)
    for model in (training.step.model, training.step.average.module):
        assert {type(layer) is SyncBatchNorm2d for layer in layers(model)} == {sync_bn}
    optimized = {id(weight) for group in training.step.optimizer.param_groups for weight in group["params"]}
    assert optimized == {id(weight) for weight in training.step.model.parameters()}
    assert training.step.slots.comm.size == 2


@pytest.mark.parametrize("ema_epochs", [0.0, 2.0])
def test_the_model_that_is_evaluated_is_compiled_too(monkeypatch, ema_epochs):
    compiled = []

    def compile_it(model):
        compiled.append(model)

    monkeypatch.setattr(torch.nn.Module, "compile", compile_it)
    step = assembled(ema_epochs=ema_epochs, compile=True).step
    assert set(compiled) == {step.model, step.evaluated}
    compiled.clear()
    assembled(ema_epochs=ema_epochs)
    assert compiled == []


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reducer": "horovod", "fusion_groups": 3}, {"reducer": "horovod", "groups": 3, "bucket_mb": 0.0}),
        ({"compression": "fp16", "fusion_threshold_mb": 16.0}, {"is_half": True, "has_scale": True, "bucket_mb": 16.0}),
        ({"deterministic": True}, {"bucket_mb": 0.0}),
        ({"precision": "fp16", "compression": "fp16"}, {"is_half": True}),
    ],
)
def test_what_the_settings_say_of_gradients_reaches_the_sync(monkeypatch, settings, told):
    usual = {
        "is_half": False,
        "has_scale": False,
        "reducer": "bucket",
        "groups": None,
        "bucket_mb": 8.0,
        "is_sharded": False,
    }
    found = []

    def sum_gradients(_, __, wire, **options):
        found.append({"is_half": wire.is_half, "has_scale": bool(wire.state_dict()), **options})
        return GradientSync()

    monkeypatch.setattr(reducers, "sum_gradients", sum_gradients)
    assembled(**settings)
    assert found == [{**usual, **told}]
