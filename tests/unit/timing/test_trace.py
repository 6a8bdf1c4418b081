import gzip
import json

import pytest
import torch

from hvdtrain.timing.phases import OFF, HostClock
from hvdtrain.timing.trace import BEFORE_STEPS, TorchTrace, unmeasured_steps

CPU = torch.device("cpu")


def run(trace, steps):
    for _ in range(steps):
        for phase in ("read", "forward", "sync"):
            trace.enter(phase)
            torch.ones(8) @ torch.ones(8)
        trace.step_done()
    trace.close()


def names_in(file):
    with gzip.open(file) as text:
        return [event.get("name") for event in json.load(text)["traceEvents"]]


@pytest.mark.parametrize(("steps", "traced"), [(20, 4), (BEFORE_STEPS + 4, 4), (BEFORE_STEPS + 2, 2)])
def test_the_requested_steps_are_traced_after_the_warm_up_with_their_phases(tmp_path, steps, traced):
    file = tmp_path / "profile" / "rank-0.pt.trace.json.gz"
    run(TorchTrace(OFF, file, steps=4, device=CPU), steps)
    names = names_in(file)
    assert {name: names.count(name) for name in ("read", "forward", "sync", "aten::dot")} == {
        "read": traced,
        "forward": traced,
        "sync": traced,
        "aten::dot": 3 * traced,
    }
    assert [path.name for path in file.parent.iterdir()] == [file.name]


def test_a_trace_that_cannot_be_written_is_one_line(tmp_path, capsys):
    (tmp_path / "profile").write_text("not a folder")
    run(TorchTrace(OFF, tmp_path / "profile" / "rank-0.pt.trace.json.gz", steps=1, device=CPU), 10)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert "profile/rank-0" in lines[0]


def test_the_wrapped_clock_gets_every_call(tmp_path):
    clock = HostClock(unmeasured_steps=unmeasured_steps(1))
    trace = TorchTrace(clock, tmp_path / "t.json.gz", steps=1, device=CPU)
    run(trace, unmeasured_steps(1) + 3)
    assert trace.means() == clock.means()
    assert trace.means().steps == 3
    assert trace.means().phases_s["forward"] > 0
