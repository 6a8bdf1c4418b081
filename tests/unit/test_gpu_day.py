"""bench/gpu_day.py goes on where it was cut off, and its page never says more than what has run."""

import json
import sys
from pathlib import Path

import pytest

from bench import gpu_day


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Run these stages on so many GPUs: (exit status, their results, the page)."""

    def start(stages, names=(), gpus=1, limit_s=60.0):
        monkeypatch.setattr(gpu_day, "STAGES", stages)
        status = gpu_day.run(list(names), tmp_path, gpus, limit_s)
        results = json.loads((tmp_path / "results.json").read_text())
        return status, {name: result["state"] for name, result in results.items()}, (tmp_path / "page.md").read_text()

    return start


def python(program, **how):
    return lambda day: day.call(sys.executable, "-c", program, **how) or {"answer": 42.0}


def test_without_a_gpu_nothing_runs_and_no_row_has_figures(day):
    status, states, page = day(gpu_day.STAGES, gpus=0)
    assert (status, set(states.values())) == (0, {"NOT RUN"})
    assert page.count("| NOT RUN | no GPU |  |  |\n") == len(gpu_day.STAGES)


def test_what_ended_well_is_kept_and_the_rest_runs_again(day):
    runs = []

    def good(_):
        runs.append("good")
        return {"images/s": 1234.5678}

    bad = python("import sys; print('why' or 1 | 2); sys.exit(3)")
    status, states, page = day({"good": good, "bad": bad, "more": lambda _: {"state": "GOES ON"}})
    assert (status, states) == (1, {"good": "OK", "bad": "FAILED", "more": "GOES ON"})
    assert "| OK | images/s: 1235 |" in page
    [row] = [line for line in page.splitlines() if line.startswith("| bad")]
    assert "exit status 3" in row
    assert row.count("|") - row.count("\\|") == 7
    assert "why" in Path(row.split(" | ")[-1].rstrip(" |")).read_text()
    status, states, _ = day({"good": good, "bad": python("pass"), "more": python("pass")})
    assert (status, set(states.values()), runs) == (0, {"OK"}, ["good"])
    day({"good": good}, names=["good"])
    assert runs == ["good", "good"]


def test_a_stage_lacks_something(day):
    def alone(_):
        raise gpu_day.NotRunError("one GPU")

    status, states, page = day({"two": alone})
    assert (status, states) == (0, {"two": "NOT RUN"})
    assert "| NOT RUN | one GPU |" in page


SLEEPS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"


@pytest.mark.parametrize(("saves", "state"), [(False, "FAILED"), (True, "OK")])
def test_a_stage_ends_when_its_time_is_over(day, saves, state):
    _, states, page = day({"long": python(SLEEPS, saves=saves)}, limit_s=1.5)
    assert states == {"long": state}
    assert saves or "not done after 2 s" in page


def test_a_stage_that_dies_as_it_should(day):
    dies = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert day({"dies": python(dies, status=-9)})[1] == {"dies": "OK"}


def test_a_rehearsal_has_no_figures(day, monkeypatch):
    monkeypatch.setattr(gpu_day, "REHEARSAL", True)
    _, states, page = day({"fast": lambda _: {"images/s": 99.0}}, gpus=0)
    assert states == {"fast": "REHEARSED"}
    assert "99" not in page
