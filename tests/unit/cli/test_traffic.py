"""--measured RUN of plan, run and check."""

import json

import pytest

from launch.machine.topology import Link, to_json
from tests.unit.cli.commands import ended, refusal
from tests.unit.machines import linked

SLICES = {"exchanges": [], "sums_bytes": 400_000_000, "gradient_bytes": 16_000_000}
WHOLE = {**SLICES, "sums_bytes": 0}
PLAN = ("plan", "--topology", "h1=four.json", "-np", "4", "--measured")
FAST = [[None if a == b else 90.0 if {a, b} == {0, 1} else 10.0 for b in range(4)] for a in range(4)]
SPEEDS = {"host": "h1", "gpus": [0, 1, 2, 3], "uuids": [None] * 4, "gb_per_s": FAST}
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
    (tmp_path / "speeds.json").write_text(json.dumps({"bandwidth": {"gpu_links": [SPEEDS]}}))
    monkeypatch.chdir(tmp_path)


def gpus_of(out):
    return [line.split()[3] for line in out.splitlines()[1:5]]


def test_slices_are_mapped_to_pairs_and_the_plan_says_what_that_gains(capsys):
    status, out, err = ended(capsys, *PLAN, "run", *PAIRS, *PROGRAM)
    assert status == 0, err
    first, second, *others = gpus_of(out)
    assert {frozenset((first, second)), frozenset(others)} == {frozenset("02"), frozenset("13")}
    assert "times as fast as with ranks in order (50.7 ms)" in out


def test_a_file_of_speeds_and_a_run_are_told_apart(capsys):
    _, out, err = ended(capsys, *PLAN, "run/traffic.json", "--measured", "speeds.json", *PAIRS, *PROGRAM)
    first, second, *_ = gpus_of(out)
    assert {first, second} in ({"0", "1"}, {"2", "3"}), err


def test_hosts_that_are_alike_have_one_line(capsys):
    both = ("plan", "--topology", "h1=four.json", "--topology", "h2=four.json", "--ranks-per-replica", "2")
    _, out, err = ended(capsys, *both, "--measured", "run", *PROGRAM)
    assert "\nh1, h2: the slowest links take " in out, err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ((*PLAN, "run", *PROGRAM), "--measured: a replica of that run is 2 ranks: pass --ranks-per-replica 2"),
        ((*PLAN, "whole.json", *PAIRS, *PROGRAM), "a replica of that run is 1 rank: leave --ranks-per-replica out"),
        ((*PLAN, "four.json", *PROGRAM), "four.json: it is not from hvdlaunch check --bandwidth"),
        ((*PLAN, ".", *PROGRAM), "--measured traffic.json cannot be read: No such file or directory"),
        ((*PLAN, "run", "--measured", "run/traffic.json", *PAIRS, *PROGRAM), "a second one of its kind. Pass"),
        (("check", "--measured", "whole.json"), "--measured says how many bytes --bandwidth sums: add that"),
        (("check", "--bandwidth", "--measured", "speeds.json"), "Pass the folder of a run, not measurements."),
        (("check", "--bandwidth", "--measured", "run"), "that run is 2 ranks, and check sums over single ones"),
    ],
)
def test_bad_input_is_one_line_and_status_2(capsys, words, problem):
    assert problem in refusal(capsys, *words)
