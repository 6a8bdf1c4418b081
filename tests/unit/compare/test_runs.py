import json
import math
from dataclasses import replace

import pytest

from hvdtrain.compare import runs as runfolder
from hvdtrain.safety.exits import BadInput
from tests.refusals import require_facts

from .runfolders import make_run


def read(folder):
    complaints = []
    return runfolder.read_run(folder, complaints), complaints


def test_runs_are_found_below_once_each_in_the_order_given(tmp_path):
    a, b, c = (make_run(tmp_path / "runs" / name) for name in ("x/a", "x/b", "y/c"))
    make_run(a / "checkpoints" / "step-8")
    (tmp_path / "runs" / "z").mkdir()
    assert runfolder.find_folders([tmp_path / "runs" / "y", tmp_path / "runs", b]) == [c, a, b]


@pytest.mark.parametrize(("place", "line"), [("gone", "gone: not a folder"), ("empty", "empty: no run")])
def test_nothing_found_is_one_line(tmp_path, place, line):
    (tmp_path / "empty").mkdir()
    with pytest.raises(BadInput, match=line):
        runfolder.find_folders([tmp_path / place])


def test_a_whole_run_is_read_without_complaint(tmp_path):
    run, complaints = read(make_run(tmp_path / "a", np=2, seed=7, hosts=["one", "two"]))
    assert not complaints
    assert (run.name, run.seed, run.exit_reason, run.hosts) == ("a", 7, "finished", ("one", "two"))
    assert (run.number("train_images_per_s"), run.number("memory.resident_mib")) == (1000, 612.4)
    assert run.number("no_such_key") is run.number("np.no_such_part") is None
    assert [replace(run, result={"x": odd}).number("x") for odd in (math.nan, 1e300, True, "5")] == [None] * 4
    shown = [run.settings[name] for name in ("np", "hosts", "global_batch", "lr", "augment", "torch")]
    assert shown == ["2", "2", "128", "not set", "yes", "2.11.0"]
    assert not {"seed", "run", "runs_dir", "experiment", "overwrite", "host", "command", "derived"} & set(run.settings)


def test_variables_of_a_process_are_no_settings(tmp_path):
    variables = {"HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711", "HOROVOD_FUSION_THRESHOLD": "64"}
    variables["HOROVOD_LOG_LEVEL"] = "fatal"
    run, _ = read(make_run(tmp_path / "a", environment={"horovod_settings": variables}))
    assert {name for name in run.settings if name.isupper()} == {"HOROVOD_FUSION_THRESHOLD"}


def test_curves_take_report_steps_for_training_and_epochs_for_evaluation(tmp_path):
    run, _ = read(make_run(tmp_path / "a", np=2, accuracy=0.9))
    loss, accuracy = run.curve("train/loss"), run.curve("eval/accuracy")
    assert [point.value for point in loss] == pytest.approx([1.9, 1.4, 0.9, 0.4])
    assert [point.epoch for point in loss] == [1, 2, 3, 4]
    assert [point.value for point in accuracy] == pytest.approx([0.6, 0.7, 0.8, 0.9])
    assert [point.step for point in accuracy] == [12, 24, 36, 48]
    assert accuracy[-1].seconds == 5.76


def test_a_curve_has_one_value_for_each_step(tmp_path):
    folder = make_run(tmp_path / "a", np=2, accuracy=0.9, metric="iou")
    repeated = {"step": 48, "seconds": 9, "eval/iou": 0.95}
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(repeated) + "\n")
    run, _ = read(folder)
    assert [point.value for point in run.curve("train/loss")] == pytest.approx([1.9, 1.4, 0.9, 0.4])
    assert [(point.step, point.value) for point in run.curve("eval/iou")[2:]] == [(36, pytest.approx(0.8)), (48, 0.95)]


def test_torn_metrics_are_reported_and_the_rest_is_shown(tmp_path):
    folder = make_run(tmp_path / "a")
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(whole[:-20])
    run, complaints = read(folder)
    assert len(run.curve("eval/accuracy")) == 3
    [complaint] = complaints
    require_facts(complaint, f"{folder}/metrics.jsonl: line 9 of 9 truncated ... the rest is shown")


def test_a_run_without_result_or_settings_is_named_and_keeps_the_rest(tmp_path):
    folder = make_run(tmp_path / "a", np=2)
    (folder / "result.json").unlink()
    run, (line,) = read(folder)
    assert (run.result, run.exit_reason, run.settings["np"], run.hosts) == ({}, "-", "2", ("one",))
    assert line.startswith(f"{folder}: no result.json")
    (folder / "config.json").unlink()
    run, lines = read(folder)
    assert run.settings == {}
    assert "no config.json" in lines[-1]
