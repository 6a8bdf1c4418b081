from dataclasses import asdict, replace
from pathlib import Path

import pytest

from hvdtrain.checkpoint.changes import describe_changes, describe_run
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.vision.settings import EffnetSettings, scaled
from tests.refusals import refused, require_facts

CONFIG = replace(scaled(), run="r")


def of_run(settings, samples=1438):
    return describe_run(asdict(settings), np=1, global_batch=256, samples=samples, unit="images")


def saved(*, epoch=1, visited=128, **changes):
    return {**of_run(replace(CONFIG, **changes)), "position": {"epoch": epoch, "visited": visited}}


def lines(then=None, *, images=1438, **changes):
    now = of_run(replace(CONFIG, **changes), images)
    return describe_changes(then or saved(), now, EffnetSettings)


def refusal(**options):
    line = refused(lambda: lines(**options))
    assert "remove the run folder" in line
    return line


def test_the_same_settings_and_others_of_where_a_run_is_kept_and_watched_are_no_difference():
    assert lines() == []
    assert lines(runs_dir=Path("elsewhere"), keep=5, report_every_steps=1, profile="on", workers=0) == []


def test_each_setting_that_differs_is_named_with_what_holds():
    assert lines(lr=0.05, epochs=30, batch_size_per_rank=64) == [
        "--batch-size-per-rank was 256, now 64: the command line's holds",
        "--epochs was 25, now 30: the command line's holds",
        "--lr was None, now 0.05: the command line's holds",
    ]
    assert lines(pretrained="w.pth") == ["--pretrained was None, now w.pth: the checkpoint's weights hold"]


@pytest.mark.parametrize("change", [{"model": "efficientnet_b1"}, {"optimizer": "lamb"}, {"ema_epochs": 0.0}])
def test_what_the_tensors_mean_cannot_change(change):
    (name, value), *_ = change.items()
    was = getattr(CONFIG, name)
    option = f"--{name.replace('_', '-')}"
    require_facts(refusal(**change), f"{option} {value}: ... checkpoint ... {option} {was}, choose another --run")


def test_an_optimizer_of_the_program_cannot_be_another_and_no_option_is_proposed():
    with pytest.raises(BadInput, match=r"^optimizer AdamW: the checkpoint of this run has SGD\. Use that, choose"):
        lines(saved(optimizer="SGD"), optimizer="AdamW")


def test_a_moving_average_cannot_begin_in_the_middle_but_its_memory_may_change():
    require_facts(refusal(then=saved(ema_epochs=0.0)), "--ema-epochs 2.0: ... checkpoint ... 0.0")
    assert lines(ema_epochs=3.0) == ["--ema-epochs was 2.0, now 3.0: the command line's holds"]


def test_other_data_are_refused_even_if_they_are_as_many():
    require_facts(refusal(images=1437), "training images: ... 1438 ... 1437 ... another --run")
    then, now = {**saved(), "content": "a"}, of_run(CONFIG)
    with pytest.raises(BadInput, match=r"training images: .*another --run"):
        describe_changes(then, {**now, "content": "b"}, EffnetSettings)
    assert describe_changes(then, {**now, "content": "a"}, EffnetSettings) == []


@pytest.mark.parametrize(("epoch", "visited", "least"), [(4, 0, 4), (4, 128, 5)])
def test_fewer_epochs_than_are_begun_would_call_half_an_epoch_finished(epoch, visited, least):
    then = saved(epoch=epoch, visited=visited)
    assert lines(then, epochs=least) == [f"--epochs was 25, now {least}: the command line's holds"]
    assert refusal(then=then, epochs=least - 1).startswith(f"--epochs {least - 1}: this run is in epoch {least} ")


def test_a_setting_that_one_version_does_not_know_is_named():
    then = saved()
    del then["config"]["label_smoothing"]
    then["config"]["gone"] = 3
    assert lines(then) == [
        "--gone was 3, now None: the command line's holds",
        "--label-smoothing was None, now 0.1: the command line's holds",
    ]


def test_an_option_of_an_earlier_version_is_no_difference_but_what_replaces_it_is():
    then = saved(precision="fp32")
    then["config"]["tf32"] = True
    assert lines(then) == ["--precision was fp32, now tf32: the command line's holds"]


def test_a_run_of_so_many_steps_keeps_their_size():
    now = of_run(CONFIG)
    now = {**now, "global_batch": 128, "config": {**now["config"], "max_steps": 100}}
    with pytest.raises(BadInput, match=r"256 images per step, .* 128\. .*--global-batch-size 256"):
        describe_changes(saved(), now, EffnetSettings)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, "batch per rank is kept, 768"), ({"global_batch_size": 256}, "global batch is kept, 256")],
)
def test_another_number_of_ranks_is_said_in_one_line(settings, kept):
    then = saved(**settings)
    now = {**of_run(replace(CONFIG, **settings)), "np": 3, "global_batch": int(kept.split()[-1])}
    assert describe_changes(then, now, EffnetSettings) == [
        f"3 ranks instead of 1: the {kept} images per step instead of 256; random numbers are new ones"
    ]
