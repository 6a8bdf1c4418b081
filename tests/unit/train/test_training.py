import math
import os
import re
from dataclasses import replace

import pytest
import torch

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import BadInput
from hvdtrain.train import optim, preflight, training
from hvdtrain.train.batch_norm import SyncBatchNorm2d
from hvdtrain.train.loop import Position
from hvdtrain.vision import config, models
from hvdtrain.vision import images as data

CPU = torch.device("cpu")
DIGITS = replace(config.scaled(), data="digits", model="efficientnet_tiny", batch_size_per_rank=64)


class OneOf(SerialComm):
    """One rank of several that are not there but agree; keeps how it was asked to send gradients."""

    def __init__(self, size):
        self.size = self.local_size = size
        self.asked = []

    def gather(self, value):
        return [value] * self.size

    def gradient_sync(self, model, *, compression, groups=None):
        self.asked.append((compression, groups))
        return super().gradient_sync(model, compression=compression, groups=groups)


def refused(attempt):
    with pytest.raises(BadInput) as error:
        attempt()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_scaled_recipe_follows_the_global_batch():
    lr = training.learning_rate(config.scaled(), global_batch=1024, steps_per_epoch=10)
    assert lr.peak == pytest.approx(4 * optim.BASE_LR["sgd"])
    assert (lr.warmup_steps, lr.total_steps, lr.shape) == (50, 250, "cosine")


def test_book_recipe_has_one_rate_whatever_the_global_batch():
    lr = training.learning_rate(config.book(), global_batch=4096, steps_per_epoch=10)
    assert {lr(step) for step in range(250)} == {1e-4}


def test_given_rate_is_scaled_and_a_short_run_warms_up_in_half_of_it():
    settings = replace(DIGITS, lr=0.02, optimizer="adamw", epochs=4)
    lr = training.learning_rate(settings, global_batch=1024, steps_per_epoch=5)
    assert lr.peak == pytest.approx(0.04)
    assert (lr.warmup_steps, lr.total_steps) == (10, 20)


@pytest.mark.parametrize(("augment", "crop"), [(True, True), (False, False)])
def test_digits_are_cropped_but_never_mirrored(augment, crop):
    images = preflight.load_images(SerialComm(), DIGITS)
    found = training.pictures_for(replace(DIGITS, augment=augment, cutout=5), images, CPU)
    assert (found.crop, found.flip, found.cutout) == (crop, False, 5)
    assert found.mean.tolist() == pytest.approx(images.mean)
    assert found.std.tolist() == pytest.approx(images.std)
    plain = training.pictures_for(replace(DIGITS, normalize=False), images, CPU)
    assert (plain.mean.tolist(), plain.std.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert training.pictures_for(DIGITS, replace(images, mirror=True), CPU).flip is True


def test_images_are_normalised_to_mean_0_and_deviation_1():
    images = preflight.load_images(SerialComm(), DIGITS)
    values = training.pictures_for(DIGITS, images, CPU).for_evaluation(images.train.images)
    assert values.mean((0, 2, 3)).tolist() == pytest.approx([0.0] * 3, abs=1e-4)
    assert values.std((0, 2, 3)).tolist() == pytest.approx([1.0] * 3, abs=1e-4)


@pytest.mark.parametrize(
    ("batch", "accumulate", "named"),
    [
        (2000, 1, "--batch-size-per-rank 2000 is more than a rank's share"),
        (500, 4, "--batch-size-per-rank 500 x --accumulate-steps 4 is more than a rank's share"),
    ],
)
def test_a_batch_larger_than_the_rank_share_is_refused(batch, accumulate, named):
    settings = replace(DIGITS, batch_size_per_rank=batch, accumulate_steps=accumulate)
    assert refused(lambda: preflight.load_images(SerialComm(), settings)).startswith(named)


def test_the_model_depends_on_the_seed_alone():
    first, again, other = (preflight.build_model(SerialComm(), replace(DIGITS, seed=seed), 10) for seed in (1, 1, 2))
    name = "features.0.0.weight"
    assert all(torch.equal(one, again.state_dict()[key]) for key, one in first.state_dict().items())
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_pretrained_weights_are_in_the_built_model(tmp_path):
    weights = models.build("efficientnet_tiny", classes=1000).state_dict()
    torch.save(weights, tmp_path / "tiny.pt")
    model = preflight.build_model(SerialComm(), replace(DIGITS, pretrained=str(tmp_path / "tiny.pt")), 10)
    assert torch.equal(model.features[0][0].weight, weights["features.0.0.weight"])
    assert model.classifier[1].out_features == 10


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield
    os.umask(before)


def test_run_folder_is_the_named_one_or_one_by_date_and_time(tmp_path, umask):
    settings = replace(DIGITS, runs_dir=tmp_path, experiment="try")
    first = preflight.make_run_folder(SerialComm(), replace(settings, run="first"), training_images=1)
    assert first.path == tmp_path / "try" / "first"
    folder = preflight.make_run_folder(SerialComm(), settings, training_images=1).path
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name)
    assert (folder / "ranks").is_dir()
    assert {path.stat().st_mode & 0o777 for path in (folder, folder / "ranks")} == {0o700}


def test_fp16_is_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(lambda: preflight.usable_device(SerialComm(), "fp16")).startswith("--precision fp16 needs a GPU")
    assert preflight.usable_device(SerialComm(), "bf16") == CPU


# --- batch sizes


def assembled(ranks=1, **changes):
    comm = OneOf(ranks)
    settings = replace(DIGITS, **changes)
    images = preflight.load_images(comm, settings)
    return comm, training.assemble(comm, settings, images, preflight.build_model(comm, settings, images.classes), CPU)


GLOBAL_64 = {"batch_size_per_rank": 256, "global_batch_size": 64}


@pytest.mark.parametrize(
    ("ranks", "changes", "micro_batch", "global_batch"),
    [
        (4, GLOBAL_64, 16, 64),
        (1, GLOBAL_64, 64, 64),
        (4, {**GLOBAL_64, "accumulate_steps": 2}, 8, 64),
        (64, GLOBAL_64, 1, 64),
        (4, {"batch_size_per_rank": 16}, 16, 64),
        (4, {"batch_size_per_rank": 16, "accumulate_steps": 2}, 16, 128),
    ],
)
def test_the_global_batch_is_shared_by_ranks_and_passes(ranks, changes, micro_batch, global_batch):
    _, training = assembled(ranks, **changes)
    assert (training.micro_batch, training.global_batch) == (micro_batch, global_batch)
    assert training.steps_per_epoch == math.ceil(len(training.images.train) / global_batch)
    assert data.passes(global_batch, size=ranks, micro_batch=micro_batch) == changes.get("accumulate_steps", 1)
    assert training.lr.peak == pytest.approx(optim.BASE_LR["sgd"] * global_batch / 256)


@pytest.mark.parametrize(
    ("size", "ranks", "accumulate", "near"),
    [(50, 4, 1, 48), (51, 4, 1, 52), (2, 4, 1, 4), (64, 3, 1, 63), (64, 4, 3, 60), (1, 2, 2, 4), (1000, 7, 2, 994)],
)
def test_a_global_batch_that_the_ranks_do_not_divide_is_refused_with_one_that_they_do(size, ranks, accumulate, near):
    settings = replace(DIGITS, batch_size_per_rank=256, global_batch_size=size, accumulate_steps=accumulate)
    message = refused(lambda: preflight.images_at_a_time(settings, ranks))
    assert message.startswith(f"--global-batch-size {size} cannot be divided by {ranks} ranks x --accumulate-steps ")
    assert message.endswith(f"{accumulate}: {near} can")
    found = preflight.images_at_a_time(replace(settings, global_batch_size=near), ranks)
    assert found * ranks * accumulate == near


def test_an_indivisible_global_batch_is_refused_while_loading():
    settings = replace(DIGITS, batch_size_per_rank=256, global_batch_size=50)
    message = refused(lambda: preflight.load_images(SerialComm(), replace(settings, accumulate_steps=4)))
    assert message.startswith("--global-batch-size 50 cannot be divided by 1 ranks x --accumulate-steps 4: 48 can")


@pytest.mark.parametrize(
    ("ranks", "changes"),
    [(1, {"batch_size_per_rank": 1}), (4, {"batch_size_per_rank": 256, "global_batch_size": 4})],
)
def test_sync_bn_with_one_image_per_rank_is_refused(ranks, changes):
    settings = replace(DIGITS, sync_bn=True, **changes)
    message = refused(lambda: preflight.images_at_a_time(settings, ranks))
    assert message == "--sync-bn with a batch of 1 per rank leaves nothing to normalise: use at least 2"
    assert preflight.images_at_a_time(replace(settings, sync_bn=False), ranks) == 1


# --- what assemble puts together


@pytest.mark.parametrize("sync_bn", [False, True])
def test_batch_norm_is_over_all_ranks_if_asked_for(sync_bn):
    comm, training = assembled(2, sync_bn=sync_bn, ema_epochs=1.0)
    for model in (training.step.model, training.average.module):
        assert {type(layer) is SyncBatchNorm2d for layer in models.batch_norms(model)} == {sync_bn}
    optimized = {id(one) for group in training.step.optimizer.param_groups for one in group["params"]}
    assert optimized == {id(one) for one in training.step.model.parameters()}
    assert training.step.comm is comm


@pytest.mark.parametrize("groups", [None, 3])
def test_fusion_groups_and_compression_reach_the_sync(groups):
    comm, _ = assembled(fusion_groups=groups, compression="fp16")
    assert comm.asked == [("fp16", groups)]


@pytest.mark.parametrize(("name", "kind", "factor"), [("lars", optim.Lars, 0.25), ("lamb", optim.Lamb, 0.5)])
def test_layerwise_optimizers_have_their_own_rate(name, kind, factor):
    _, training = assembled(optimizer=name)  # a global batch of 64
    assert type(training.step.optimizer) is kind
    assert training.lr.peak == pytest.approx(optim.BASE_LR[name] * factor)


def test_an_epoch_with_sync_bn_and_a_global_batch_goes_through():
    changes = {"global_batch_size": 720, "accumulate_steps": 2, "sync_bn": True, "optimizer": "lamb"}
    _, training = assembled(batch_size_per_rank=256, **changes)  # 2 steps, each in 2 passes
    [report] = training.epoch(Position())
    assert (report.skipped, report.end) == ([], None)
    assert 0 < report.totals.means().loss < 5


def test_limits_are_those_of_the_settings():
    _, training = assembled(batch_size_per_rank=64, max_skipped_steps=2)
    with torch.no_grad():
        training.step.model.features[0][0].weight.fill_(math.nan)
    [report] = training.epoch(Position())
    assert [number for number, _ in report.skipped] == [1, 2]
    assert report.end.status == 3
