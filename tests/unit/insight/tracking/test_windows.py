import json
from types import SimpleNamespace

import pytest

from hvdtrain.core.phases import OFF, PHASES, StepMeans
from hvdtrain.insight.tracking import windows
from hvdtrain.insight.tracking.windows import WindowWriter


@pytest.fixture
def clock(monkeypatch):
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(windows, "time", SimpleNamespace(perf_counter=lambda: now.s))
    return now


def made(file, *, rank=0, phases=OFF, every=1, shares=()):
    comm = SimpleNamespace(rank=rank, allgather=lambda own: [own, *shares])
    return WindowWriter(file, comm, phases, batch=8, epoch_samples=100, every=every)


def step(hook, clock, numbers, seconds):
    for number in numbers:
        hook.begin_step(number)
        clock.s += seconds


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def test_a_window_has_whole_steps_and_lasts_long_enough(tmp_path, clock):
    for rank, windows_of_rank in enumerate(([(24, 100, pytest.approx(0.3))] * 2, [])):
        file = tmp_path / f"of-{rank}"
        step(made(file, rank=rank), clock, range(1, 8), 0.1)
        assert [
            tuple(line[name] for name in ("samples", "epoch_samples", "seconds")) for line in lines(file)
        ] == windows_of_rank


def test_a_window_has_whole_rounds_and_none_spans_an_evaluation(tmp_path, clock):
    hook = made(tmp_path / "windows", every=4)
    step(hook, clock, range(1, 8), 1.0)
    hook.epoch_trained(1)
    clock.s += 100
    step(hook, clock, range(8, 13), 1.0)
    assert [(line["samples"], line["seconds"]) for line in lines(tmp_path / "windows")] == [(32, 4.0)] * 2


def test_shares_are_the_least_of_all_ranks(tmp_path, clock):
    file = tmp_path / "windows.jsonl"
    phases_s = {**dict.fromkeys(PHASES, 0.0), "forward": 0.5, "sync": 0.4, "read": 0.1}
    measured = SimpleNamespace(means=lambda: StepMeans(steps=1, step_s=1.0, phases_s=phases_s))
    hook = made(file, phases=measured, shares=([0.1, 0.3],))
    hook.record(None)
    step(hook, clock, range(1, 3), 1.0)
    assert lines(file)[0]["shares"] == {"communication": pytest.approx(0.1), "input": pytest.approx(0.1)}
