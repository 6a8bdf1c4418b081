import re
from dataclasses import replace

import pytest
import torch

from hvdtrain import config, effnet, models, optim
from hvdtrain.comm import SerialComm
from hvdtrain.exits import BadInput

CPU = torch.device("cpu")
DIGITS = replace(config.scaled(), data="digits", model="efficientnet_tiny", batch_size_per_rank=64)


def refused(attempt):
    with pytest.raises(BadInput) as error:
        attempt()
    assert "\n" not in str(error.value)
    return str(error.value)


def test_scaled_recipe_follows_the_global_batch():
    lr = effnet.learning_rate(config.scaled(), global_batch=1024, steps_per_epoch=10)
    assert lr.peak == pytest.approx(4 * optim.BASE_LR["sgd"])
    assert (lr.warmup_steps, lr.total_steps, lr.shape) == (50, 250, "cosine")


def test_book_recipe_has_one_rate_whatever_the_global_batch():
    lr = effnet.learning_rate(config.book(), global_batch=4096, steps_per_epoch=10)
    assert {lr(step) for step in range(250)} == {1e-4}


def test_given_rate_is_scaled_and_a_short_run_warms_up_in_half_of_it():
    settings = replace(DIGITS, lr=0.02, optimizer="adamw", epochs=4)
    lr = effnet.learning_rate(settings, global_batch=1024, steps_per_epoch=5)
    assert lr.peak == pytest.approx(0.04)
    assert (lr.warmup_steps, lr.total_steps) == (10, 20)


@pytest.mark.parametrize(("augment", "crop"), [(True, True), (False, False)])
def test_digits_are_cropped_but_never_mirrored(augment, crop):
    images = effnet.load_images(SerialComm(), DIGITS)
    found = effnet.pictures_for(replace(DIGITS, augment=augment, cutout=5), images, CPU)
    assert (found.crop, found.flip, found.cutout) == (crop, False, 5)
    assert found.mean.tolist() == pytest.approx(images.mean)
    assert found.std.tolist() == pytest.approx(images.std)
    plain = effnet.pictures_for(replace(DIGITS, normalize=False), images, CPU)
    assert (plain.mean.tolist(), plain.std.tolist()) == ([0.0] * 3, [1.0] * 3)
    assert effnet.pictures_for(DIGITS, replace(images, mirror=True), CPU).flip is True


def test_images_are_normalised_to_mean_0_and_deviation_1():
    images = effnet.load_images(SerialComm(), DIGITS)
    values = effnet.pictures_for(DIGITS, images, CPU).for_evaluation(images.train.images)
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
    assert refused(lambda: effnet.load_images(SerialComm(), settings)).startswith(named)


def test_the_model_depends_on_the_seed_alone():
    first, again, other = (effnet.build_model(SerialComm(), replace(DIGITS, seed=seed), 10) for seed in (1, 1, 2))
    name = "features.0.0.weight"
    assert all(torch.equal(one, again.state_dict()[key]) for key, one in first.state_dict().items())
    assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_pretrained_weights_are_in_the_built_model(tmp_path):
    weights = models.build("efficientnet_tiny", classes=1000).state_dict()
    torch.save(weights, tmp_path / "tiny.pt")
    model = effnet.build_model(SerialComm(), replace(DIGITS, pretrained=str(tmp_path / "tiny.pt")), 10)
    assert torch.equal(model.features[0][0].weight, weights["features.0.0.weight"])
    assert model.classifier[1].out_features == 10


def test_run_folder_is_the_named_one_or_one_by_date_and_time(tmp_path):
    settings = replace(DIGITS, runs_dir=tmp_path, experiment="try")
    assert effnet.make_run_folder(SerialComm(), replace(settings, run="first")) == tmp_path / "try" / "first"
    folder = effnet.make_run_folder(SerialComm(), settings)
    assert re.fullmatch(r"\d{8}-\d{6}", folder.name)
    assert (folder / "ranks").is_dir()


def test_fp16_is_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(lambda: effnet.usable_device(SerialComm(), "fp16")).startswith("--precision fp16 needs a GPU")
    assert effnet.usable_device(SerialComm(), "bf16") == CPU
