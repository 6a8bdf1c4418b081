import math
from dataclasses import replace

import pytest

from hvdtrain.insight.compare import runs as runfolder
from tests.refusals import require_facts

from .runfolders import make_run


def read(folder):
    complaints = []
    return runfolder.read_run(folder, complaints), complaints


def test_runs_are_found_below_once_each_in_the_order_given(tmp_path):
    a, b, c = (make_run(tmp_path / "runs" / name) for name in ("x/a", "x/b", "y/a"))
    make_run(a / "checkpoints" / "step-8")
    (tmp_path / "runs" / "z").mkdir()
    found = runfolder.find_folders([tmp_path / "runs" / "y", tmp_path / "runs", b])
    assert found == [c, a, b]
    assert [run.name for run in runfolder.read_runs(found[1:], [])] == ["a", "b"]
    assert [run.name for run in runfolder.read_runs(found, [])] == ["y/a", "x/a", "x/b"]


def test_a_whole_run_is_read_without_complaint(tmp_path):
    variables = {"HOROVOD_RANK": "0", "HOROVOD_GLOO_RENDEZVOUS_PORT": "4711", "HOROVOD_FUSION_THRESHOLD": "64"}
    environment = {"horovod_settings": {**variables, "HOROVOD_LOG_LEVEL": "fatal"}}
    folder = make_run(tmp_path / "a", np=2, seed=7, accuracy=0.9, hosts=["one", "two"], environment=environment)
    run, complaints = read(folder)
    assert not complaints
    assert (run.name, run.seed, run.exit_reason, run.hosts) == ("a", 7, "finished", ("one", "two"))
    assert (run.number("train_images_per_s"), run.number("memory.resident_mib")) == (1000, 612.4)
    assert run.number("no_such_key") is run.number("np.no_such_part") is None
    assert [replace(run, result={"x": odd}).number("x") for odd in (math.nan, 1e300, True, "5")] == [None] * 4
    shown = [run.settings[name] for name in ("np", "hosts", "global_batch", "lr", "scale_lr", "torch")]
    assert shown == ["2", "2", "128", "not set", "yes", "2.11.0"]
    assert not {"seed", "run", "runs_dir", "experiment", "overwrite", "host", "command", "derived"} & set(run.settings)
    assert {name for name in run.settings if name.isupper()} == {"HOROVOD_FUSION_THRESHOLD"}  # not of a process
    epochs, seconds, accuracy = zip(*run.curve("eval/accuracy"), strict=True)
    assert (epochs, seconds[-1], accuracy) == ((1, 2, 3, 4), 5.76, pytest.approx((0.6, 0.7, 0.8, 0.9)))


def test_torn_metrics_are_reported_and_the_rest_is_shown(tmp_path):
    folder = make_run(tmp_path / "a")
    whole = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(f"[{whole[:-20]}")
    run, complaints = read(folder)
    assert len(run.curve("eval/accuracy")) == 3
    [complaint] = complaints
    require_facts(complaint, f"{folder}/metrics.jsonl: 2 of 9 lines truncated ... the rest is shown")


NESTED = "[" * 200_000 + "]" * 200_000


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("result.json", f'{{"np": {"9" * 5000}}}', "result.json: Exceeds the limit"),
        ("config.json", f'{{"data": {NESTED}}}', "config.json: maximum recursion depth"),
        ("config.json", "{", "config.json: Expecting property name"),
        ("environment.json", "[]", "environment.json: not an object"),
        ("result.json", '{"hosts": 5}', ""),
        ("placement.json", '{"ranks": 5}', ""),
        ("placement.json", '{"ranks": [5]}', ""),
    ],
)
def test_a_run_that_cannot_be_read_is_left_out_with_a_line(tmp_path, file, content, problem):
    folder = make_run(tmp_path / "a")
    (folder / file).write_text(content)
    run, (line,) = read(folder)
    assert run is None
    require_facts(line, f"{folder}: cannot be read ({problem} ... ; skipping this run")
