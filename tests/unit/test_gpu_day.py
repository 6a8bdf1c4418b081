"""The case gpu-day goes on where it was cut off, and its table never says more than what has run."""

import argparse
from pathlib import Path

import pytest

from bench.cases import gpu_day
from bench.pairs import RESULTS


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Run these stages with a GPU or without: (whether none has failed, states by stage, the page)."""
    monkeypatch.chdir(tmp_path)

    def start(stages, names=(), has_gpu=True, limit_s=60.0, rehearse=False):
        stages = {
            name: stage if isinstance(stage, gpu_day.Stage) else gpu_day.Stage(question="?", run=stage)
            for name, stage in stages.items()
        }
        monkeypatch.setattr(gpu_day, "STAGES", stages)
        monkeypatch.setattr(gpu_day.torch.cuda, "is_available", lambda: has_gpu)
        chosen = argparse.Namespace(stages=list(names), rehearse=rehearse, limit_s=limit_s)
        table = gpu_day.gpu_day(chosen)
        page = (RESULTS / f"{table.name}.md").read_text()
        return table.holds, {row["stage"]: row["state"] for row in table.rows}, page

    return start


def python(program, **how):
    return lambda day: day.call("-c", program, **how) or {"answer": 42.0}


def test_without_a_gpu_nothing_runs_and_no_row_has_figures(day):
    holds, states, page = day(gpu_day.STAGES, has_gpu=False)
    assert (holds, set(states.values())) == (True, {"NOT RUN"})
    assert page.count("no GPU") == len(gpu_day.STAGES)


def test_what_ended_well_is_kept_and_the_rest_runs_again(day):
    runs = []

    def good(_):
        runs.append("good")
        return {"images/s": 1234.5678}

    bad = python("import sys; print('why'); sys.exit(3)")
    holds, states, page = day({"good": good, "bad": bad, "more": lambda _: {"state": "GOES ON"}})
    assert (holds, states) == (False, {"good": "OK", "bad": "FAILED", "more": "GOES ON"})
    assert "images/s 1235" in page
    [row] = [line for line in page.splitlines() if line.startswith("| bad")]
    assert "exit status 3" in row
    assert "why" in Path(row.split("|")[-2].strip()).read_text()
    holds, states, _ = day({"good": good, "bad": python("pass"), "more": python("pass")})
    assert (holds, set(states.values()), runs) == (True, {"OK"}, ["good"])
    day({"good": good}, names=["good"])
    assert runs == ["good", "good"]


SLEEPS = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); time.sleep(60)"


@pytest.mark.parametrize(("saves", "state"), [(False, "FAILED"), (True, "OK")])
def test_a_stage_ends_when_its_time_is_over(day, saves, state):
    _, states, page = day({"long": python(SLEEPS, saves=saves)}, limit_s=3.0 if saves else 0.6)
    assert states == {"long": state}
    assert saves or "not done after 1 s" in page


def test_a_rehearsal_has_no_figures(day):
    _, states, page = day({"fast": lambda _: {"images/s": 99.0}}, has_gpu=False, rehearse=True)
    assert states == {"fast": "REHEARSED"}
    assert "99" not in page
