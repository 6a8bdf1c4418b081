"""--traffic of plan, run and check, and ways of summing that --measured has."""

import json

import pytest

from launch.machine.topology import Link, to_json
from tests.unit.cli.commands import ended, refusal
from tests.unit.machines import linked

SLICES = {"exchanges": [], "sums_bytes": 400_000_000, "gradient_bytes": 16_000_000}
WHOLE = {**SLICES, "sums_bytes": 0}
PLAN = ("plan", "--topology", "h1=four.json", "-np", "4", "--traffic")
PAIRS = ("--ranks-per-replica", "2")
PROGRAM = ("--", "prog")


@pytest.fixture(autouse=True)
def folder(monkeypatch, tmp_path):
    """Four GPUs in two pairs on a switch each, 0 with 2 and 1 with 3; the folder of a run of two slices, and a file."""
    four = linked(4, gbps=8.0, odd=dict.fromkeys([(0, 2), (1, 3)], Link(kind="PIX", gbps=24.0)))
    (tmp_path / "four.json").write_text(json.dumps(to_json(four)))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "traffic.json").write_text(json.dumps({"parts": [SLICES, SLICES]}))
    (tmp_path / "whole.json").write_text(json.dumps({"parts": [WHOLE]}))
    monkeypatch.chdir(tmp_path)


def gpus_of(out):
    return [line.split()[3] for line in out.splitlines()[1:5]]


def test_slices_are_mapped_to_pairs_and_the_plan_says_what_that_gains(capsys):
    status, out, err = ended(capsys, *PLAN, "run", *PAIRS, *PROGRAM)
    assert status == 0, err
    first, second, *others = gpus_of(out)
    assert {frozenset((first, second)), frozenset(others)} == {frozenset("02"), frozenset("13")}
    assert "times as fast as with ranks in order (50.7 ms)" in out


def test_hosts_that_are_alike_have_one_line(capsys):
    both = ("plan", "--topology", "h1=four.json", "--topology", "h2=four.json", "--ranks-per-replica", "2")
    _, out, err = ended(capsys, *both, "--traffic", "run", *PROGRAM)
    assert "\nh1, h2: the slowest links take " in out, err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((*PLAN, "run", *PROGRAM), "--traffic: a replica of that run is 2 ranks: pass --ranks-per-replica 2"),
        ((*PLAN, "whole.json", *PAIRS, *PROGRAM), "a replica of that run is 1 rank: leave --ranks-per-replica out"),
        ((*PLAN, "four.json", *PROGRAM), "four.json: expected an object with parts"),
        ((*PLAN, ".", *PROGRAM), "traffic.json cannot be read"),
        (("check", "--traffic", "whole.json"), "--traffic says how many bytes --bandwidth sums: add that"),
        (("check", "--bandwidth", "--traffic", "run"), "that run is 2 ranks, and check sums over single ones"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, words, problem):
    assert problem in refusal(capsys, *words)
