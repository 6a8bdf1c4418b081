import gzip
import json
from dataclasses import replace

import pytest
import torch

from hvdtrain.core.phases import OFF
from hvdtrain.insight.profiling.clocks import HostClock
from hvdtrain.insight.profiling.trace import BEFORE_STEPS, PhaseRanges, TorchTrace, unmeasured_steps

CPU = torch.device("cpu")


def run(trace, steps):
    for _ in range(steps):
        for phase in ("read", "forward", "sync"):
            trace.enter(phase)
            torch.ones(8) @ torch.ones(8)
        trace.end_step()
    trace.close()


def names_in(file):
    with gzip.open(file) as text:
        return [event.get("name") for event in json.load(text)["traceEvents"]]


@pytest.mark.parametrize(("steps", "traced"), [(20, 4), (BEFORE_STEPS + 2, 2)])
def test_the_requested_steps_are_traced_after_the_warm_up_with_their_phases(tmp_path, steps, traced):
    file = tmp_path / "profile" / "rank-0.pt.trace.json.gz"
    run(TorchTrace(OFF, file, steps=4, device=CPU), steps)
    names = names_in(file)
    counts = [names.count(name) for name in ("read", "forward", "sync", "aten::dot")]
    assert counts == [traced, traced, traced, 3 * traced]
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "profile").write_text("not a folder")
    run(TorchTrace(OFF, tmp_path / "profile" / "rank-0.pt.trace.json.gz", steps=1, device=CPU), 10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "profile/rank-0" in lines[0]


def test_the_wrapped_clock_gets_every_call(tmp_path, monkeypatch):
    clock = HostClock(unmeasured_steps=unmeasured_steps(1))
    trace = TorchTrace(clock, tmp_path / "t.json.gz", steps=1, device=CPU)
    run(trace, unmeasured_steps(1) + 3)
    assert replace(trace.means(), queued_s=0.0) == replace(clock.means(), queued_s=0.0)  # that is read now
    assert trace.means().steps == 3
    assert trace.means().phases_s["forward"] > 0
    monkeypatch.setattr(HostClock, "isolated", True)
    monkeypatch.setattr(HostClock, "uniform_steps", 7)
    assert (trace.isolated, trace.uniform_steps) == (True, 7)


def test_nsight_sees_each_phase_as_a_range_that_ends_with_it(monkeypatch):
    told = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", told.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: told.append(None))
    clock = HostClock(unmeasured_steps=0)
    run(PhaseRanges(clock, torch.cuda.nvtx.range), 2)
    assert told == 2 * ["read", None, "forward", None, "sync", None]
    assert clock.means().steps == 2
    ranges = PhaseRanges(OFF, torch.cuda.nvtx.range)
    ranges.enter("read")
    ranges.close()
    assert told[-2:] == ["read", None]
