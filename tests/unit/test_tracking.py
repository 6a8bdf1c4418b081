import json
import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from hvdtrain import tracking
from hvdtrain.exits import BadInput

RESULT_KEYS = [
    "np",
    "hosts",
    "model",
    "data",
    "recipe",
    "epochs",
    "steps",
    "global_batch",
    "wall_time_s",
    "train_time_s",
    "train_images_per_s",
    "eval_accuracy",
    "eval_loss",
    "skipped_steps",
    "loss_spikes",
    "exit_reason",
]
KNOWN = {
    "np": 2,
    "hosts": ["one"],
    "model": "efficientnet_tiny",
    "data": "digits",
    "recipe": "scaled",
    "epochs": 2,
    "global_batch": 64,
}


def files_under(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("_json", ".json")).write_text(content)
    return folder


def refused(folder, **options):
    with pytest.raises(BadInput) as error:
        tracking.prepare(folder, **{"overwrite": False, **options})
    assert "\n" not in str(error.value)
    assert str(folder) in str(error.value)
    return str(error.value)


# --- the run folder


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("exists", [False, True])
def test_new_or_empty_run_folder_is_made_ready(tmp_path, exists, overwrite):
    folder = tmp_path / "runs" / "effnet" / "first"
    if exists:
        folder.mkdir(parents=True)
    tracking.prepare(folder, overwrite=overwrite)
    assert [path.name for path in folder.rglob("*")] == ["ranks"]


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("result", [None, '{"exit_reason": "failed"}', '{"exit_reason"', '{"np": 1}'])
def test_unfinished_run_is_replaced(tmp_path, result, overwrite):
    folder = put(tmp_path / "run", config_json="{}", **{} if result is None else {"result_json": result})
    (folder / "ranks").mkdir()
    (folder / "ranks" / "rank-0.json").write_text("{}")
    tracking.prepare(folder, overwrite=overwrite)
    assert files_under(folder) == {}


def test_finished_run_is_kept_unless_it_may_be_overwritten(tmp_path):
    folder = put(tmp_path / "run", config_json="{}", result_json='{"exit_reason": "finished"}')
    (folder / "ranks").mkdir()
    before = files_under(folder)
    message = refused(folder)
    assert "finished run" in message
    assert "--run" in message
    assert "--overwrite" in message
    assert files_under(folder) == before
    tracking.prepare(folder, overwrite=True)
    assert files_under(folder) == {}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", ["thesis.tex", "result.json", ".hidden"])
def test_foreign_folder_is_never_touched(tmp_path, name, overwrite):
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / name).write_text("years of work")
    assert "not a run's" in refused(folder, overwrite=overwrite)
    assert files_under(folder) == {name: b"years of work"}


def test_a_run_that_died_before_its_first_file_is_replaced(tmp_path):
    tracking.prepare(tmp_path / "run", overwrite=False)
    tracking.prepare(tmp_path / "run", overwrite=False)


def test_foreign_file_in_a_run_folder_keeps_it(tmp_path):
    folder = tmp_path / "run"
    tracking.prepare(folder, overwrite=False)
    (folder / "config.json").write_text("{}")
    (folder / "model.bin").write_text("years of work")
    assert "model.bin" in refused(folder, overwrite=True)
    assert (folder / "model.bin").exists()


@pytest.mark.parametrize("below", [".", "effnet/first"])
def test_run_folder_that_is_or_is_below_a_file_is_named(tmp_path, below):
    (tmp_path / "file").write_text("content")
    assert "cannot be written" in refused(tmp_path / "file" / below)
    assert (tmp_path / "file").read_text() == "content"


# --- files


def test_written_json_reads_back_and_leaves_no_part(tmp_path):
    path = tmp_path / "one.json"
    path.write_text("old")
    tracking.write_json(path, {"lr": 0.1, "where": Path("a/b"), "list": [1, None]})
    assert json.loads(path.read_text()) == {"lr": 0.1, "where": "a/b", "list": [1, None]}
    assert [one.name for one in tmp_path.iterdir()] == ["one.json"]


def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "one.json"
    tracking.write_json(path, {"old": True})

    def full(path, text):
        path.write_bytes(text.encode()[:5])
        raise OSError("No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        tracking.write_json(path, {"new": True})
    assert json.loads(path.read_text()) == {"old": True}


# --- the tracker


@pytest.fixture
def start(tmp_path):
    """Trackers on one folder, closed at the end: a run leaves that to the end of its process."""
    started = []

    def start(*, writes=True):
        started.append(tracking.Tracker(tmp_path, writes=writes, result=KNOWN))
        return started[-1]

    yield start
    for tracker in started:
        if tracker._lines is not None:
            tracker._lines.close()
            tracker._events.close()


SKIPPED = {"step": 7, "rank": 1, "source": "loss"}
SPIKE = {"step": 9, "rank": 0, "loss": 8.0, "usual": 1.0}
ONE_SKIPPED = {"skipped": [SKIPPED], "spikes": []}


def first_epoch(tracker, *, events=ONE_SKIPPED, **changes):
    facts = {"steps": 10, "images": 600, "train_s": 3.0}
    train, test = {"loss": 1.5, "accuracy": 0.5, "lr": 0.1}, {"loss": 1.25, "accuracy": 0.625}
    tracker.count(**events)
    return tracker.epoch_done(**{**facts, "train": train, "test": test, **changes})


def second_epoch(tracker):
    train, test = {"loss": 0.75, "accuracy": 0.75, "lr": 0.05}, {"loss": 0.5, "accuracy": 0.875}
    events = {"skipped": [{**SKIPPED, "step": 12}, {**SKIPPED, "step": 13}], "spikes": [SPIKE]}
    return first_epoch(tracker, train_s=1.0, events=events, train=train, test=test)


def test_epoch_done_returns_the_metrics_of_that_epoch(start):
    tracker = start()
    first_epoch(tracker)
    assert second_epoch(tracker) == {
        "train/loss": 0.75,
        "train/accuracy": 0.75,
        "train/lr": 0.05,
        "train/images_per_s": 600.0,
        "train/skipped_steps": 3,
        "train/loss_spikes": 1,
        "eval/loss": 0.5,
        "eval/accuracy": 0.875,
    }


def test_metrics_lines_can_be_read_one_by_one_as_they_are_written(start, tmp_path):
    tracker = start()
    for epoch, report in enumerate((first_epoch, second_epoch)):
        metrics = report(tracker)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
        assert sum("event" not in json.loads(line) for line in lines) == epoch + 1
        assert lines[-1].endswith("\n")
        line = json.loads(lines[-1])
        assert line.pop("step") == 10 * (epoch + 1)
        assert line.pop("seconds") >= 0
        assert line == metrics


def test_events_are_lines_of_their_own_as_they_are_counted(start, tmp_path):
    tracker = start()
    tracker.count(skipped=[], spikes=[])
    assert (tmp_path / "metrics.jsonl").read_text() == ""
    tracker.count(skipped=[SKIPPED, {**SKIPPED, "step": 8}], spikes=[SPIKE])
    tracker.count(skipped=[], spikes=[SPIKE])
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    skipped, spike = {"event": "skipped", **SKIPPED}, {"event": "spike", **SPIKE}
    assert lines == [skipped, {**skipped, "step": 8}, spike, spike]
    assert (tracker.result["skipped_steps"], tracker.result["loss_spikes"]) == (2, 2)


def no_constant(name):
    raise AssertionError(f"{name} is no JSON")


def test_an_epoch_without_means_is_null_in_its_line(start, tmp_path):
    tracker = start()
    first_epoch(tracker, train={"loss": math.nan, "accuracy": math.nan, "lr": 0.1})
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    line = json.loads(lines[-1], parse_constant=no_constant)
    assert (line["train/loss"], line["train/accuracy"], line["train/lr"]) == (None, None, 0.1)
    assert line["eval/loss"] == 1.25


def test_result_has_exactly_its_keys_and_the_totals(start, tmp_path):
    tracker = start()
    first_epoch(tracker)
    second_epoch(tracker)
    assert not (tmp_path / "result.json").exists()
    tracker.conclude(tracking.FINISHED)
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == set(RESULT_KEYS)
    assert result.pop("wall_time_s") >= 0
    assert result == {
        **KNOWN,
        "steps": 20,
        "train_time_s": 4.0,
        "train_images_per_s": 300.0,  # 1200 images in 4 seconds, not the mean of 200 and 600
        "eval_accuracy": 0.875,
        "eval_loss": 0.5,
        "skipped_steps": 3,
        "loss_spikes": 1,
        "exit_reason": "finished",
    }
    assert not list(tmp_path.rglob("*.part"))


def test_result_of_a_run_that_ended_before_its_first_epoch(start, tmp_path):
    tracker = start()
    tracker.conclude("interrupted")
    result = json.loads((tmp_path / "result.json").read_text())
    assert set(result) == set(RESULT_KEYS)
    assert (result["steps"], result["eval_accuracy"], result["exit_reason"]) == (0, None, "interrupted")


def test_only_the_first_reason_counts(start, tmp_path):
    tracker = start()
    tracker.conclude("terminated")
    first = (tmp_path / "result.json").read_bytes()
    tracker.conclude(tracking.FINISHED)
    assert (tmp_path / "result.json").read_bytes() == first
    assert tracker.result["exit_reason"] == json.loads(first)["exit_reason"] == "terminated"


def test_scalars_read_back_from_the_one_event_file(start, tmp_path):
    tracker = start()
    first_epoch(tracker)
    second_epoch(tracker)
    assert len(list(tmp_path.glob("events.out.tfevents.*"))) == 1
    events = EventAccumulator(str(tmp_path)).Reload()  # the run may still be going on
    expected = {
        "train/loss": [1.5, 0.75],
        "train/accuracy": [0.5, 0.75],
        "train/lr": [0.1, 0.05],
        "train/images_per_s": [200.0, 600.0],
        "train/skipped_steps": [1, 3],
        "train/loss_spikes": [0, 1],
        "eval/loss": [1.25, 0.5],
        "eval/accuracy": [0.625, 0.875],
    }
    assert set(events.Tags()["scalars"]) == {*expected, "eval/accuracy_by_second"}
    for name, values in expected.items():
        found = events.Scalars(name)
        assert [one.step for one in found] == [10, 20], name
        assert [one.value for one in found] == pytest.approx(values), name


def test_accuracy_by_second_has_the_seconds_since_the_start_as_its_step(start, tmp_path, monkeypatch):
    now = 1000.0
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: now)
    tracker = start()
    now = 1042.4
    first_epoch(tracker)
    [found] = EventAccumulator(str(tmp_path)).Reload().Scalars("eval/accuracy_by_second")
    assert (found.step, found.value) == (42, 0.625)
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])["seconds"] == 42.4
    now = 1050.0
    tracker.conclude(tracking.FINISHED)
    assert tracker.result["wall_time_s"] == 50.0


def test_describe_writes_documents_and_shows_them(start, tmp_path):
    tracker = start()
    tracker.describe(config={"lr": 0.1, "runs_dir": Path("runs")}, placement=[{"rank": 0}])
    tracker._events.flush()
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.1, "runs_dir": "runs"}
    assert json.loads((tmp_path / "placement.json").read_text()) == [{"rank": 0}]
    tags = EventAccumulator(str(tmp_path)).Reload().Tags()["tensors"]
    assert {tag.split("/")[0] for tag in tags} == {"config", "placement"}


def test_a_rank_that_does_not_write_writes_nothing_but_knows_the_result(start, tmp_path):
    tracker = start(writes=False)
    tracker.describe(config={})
    assert first_epoch(tracker)["eval/accuracy"] == 0.625
    tracker.conclude(tracking.FINISHED)
    assert list(tmp_path.iterdir()) == []
    assert (tracker.result["steps"], tracker.result["exit_reason"]) == (10, "finished")
    assert (tracker.result["skipped_steps"], tracker.result["loss_spikes"]) == (1, 0)


# --- facts


def test_versions_names_what_changes_a_result():
    found = tracking.versions()
    assert set(found) == {"python", "torch", "torchvision", "horovod", "mpi4py", "numpy"}
    assert torch.__version__.startswith(found["torch"])


def test_a_package_that_is_not_installed_has_no_version(monkeypatch):
    def missing(_):
        raise tracking.PackageNotFoundError

    monkeypatch.setattr(tracking, "version", missing)
    assert tracking.versions()["horovod"] is None


def test_code_hash_changes_with_the_code(monkeypatch, tmp_path):
    (tmp_path / "one.py").write_text("a")
    monkeypatch.setattr(tracking, "__file__", str(tmp_path / "tracking.py"))
    first = tracking.code_hash()
    assert len(first) == 64
    assert tracking.code_hash() == first
    (tmp_path / "one.py").write_text("b")
    second = tracking.code_hash()
    (tmp_path / "one.py").rename(tmp_path / "two.py")
    assert len({first, second, tracking.code_hash()}) == 3


def test_environment_is_json_and_names_the_command():
    found = json.loads(json.dumps(tracking.environment()))
    assert found["command"][1:] == tracking.sys.argv
    assert found["torch"] == tracking.versions()["torch"]
    assert all(name.startswith("HOROVOD_") for name in found["horovod_settings"])
