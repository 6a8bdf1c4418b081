"""The walk of a program on a machine that is not there: what is printed, kept, and resumed."""

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.advice.tune import tune
from launch.advice.tune.measure import Measurer
from launch.errors import CommandError, LaunchError
from launch.files import held
from tests.unit.advice.tune.simulated import QUIET, Machine
from tests.unit.machines import request

REMEDIES = [
    {"name": "noop", "options": ["--noop"], "what_for": "computation", "same_training": True},
    {"name": "fast", "options": ["--fast"], "what_for": "computation", "same_training": True},
    {"name": "wire", "options": ["--wire"], "what_for": "communication", "same_training": True},
    {"name": "local", "environment": {"ROUND": "4"}, "what_for": "computation", "same_training": False},
]
PROGRAM = (sys.executable, "-c", f"import json; print(json.dumps({{'remedies': {REMEDIES}, 'epochs': 2}}))")
FOLDER = Path("tunes/mine")


def tuned(np=2, **given):
    options = {"arguments": ["-np", "2"], "minutes": 60.0, "confirm_seeds": 0, "name": "mine", **given}
    return tune.tune(request(np=np, program=PROGRAM), {}, **options)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """In place of mpirun."""
    made = Machine(times={"fast": 2.0, "local": 3.0}, shares={"communication": 0.001}, **QUIET)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Measurer, "start", lambda _, wanted, **__: made.start(wanted))
    monkeypatch.setattr(tune.hosts, "check", lambda *_, **__: SimpleNamespace(findings=(), status=0))
    return made


def written():
    return json.loads((FOLDER / "tune.json").read_text())


def result():
    return written()["result"]


def test_a_walk_ends_in_a_table_a_command_line_and_one_file(machine, capsys):
    assert tuned() == 0
    found = result()
    credited = {one["name"]: one["credited"] for one in found["remedies"]}
    assert credited == {"noop": False, "fast": True, "local": True}
    assert (found["skipped"], found["not_tried"]) == (["wire"], [])
    assert found["total"]["same"]["times"] == pytest.approx(2, rel=0.1)
    assert found["total"]["another"]["times"] == pytest.approx(6, rel=0.1)
    out = capsys.readouterr().out
    assert "| noop | computation | same | 1.00 | 1.00 to 1.00 | 1 | not 3% faster in each pair |" in out
    assert "| wire | communication | same | - | - | - | skipped: communication is too small a part |" in out
    assert re.search(r"With another training: fast, local: [56]\.\d\d times as fast \(.* 6 pairs of starts\)", out)
    assert out.splitlines()[-1].strip() == found["commands"]["same"]
    assert found["commands"]["same"].endswith(" --fast")
    assert found["commands"]["another"].startswith("env ROUND=4 hvdlaunch run -np 2 -- ")
    assert "--confirm-seeds" in out
    assert [file.name for file in FOLDER.iterdir() if file.name != "lock"] == ["tune.json"]
    starts = machine.starts
    assert tuned() == 0  # the same command again measures nothing again
    assert (result(), machine.starts) == (found, starts)


def test_a_signal_leaves_the_best_so_far_and_the_walk_is_resumed(machine, monkeypatch):
    ends = {6: KeyboardInterrupt(), 12: SystemExit(143)}

    def interrupted(_, wanted, **__):
        if machine.starts in ends:
            raise ends.pop(machine.starts)
        return machine.start(wanted)

    monkeypatch.setattr(Measurer, "start", interrupted)
    for status in (130, 143):
        assert tuned() == status
        assert result()["commands"]["same"].startswith("hvdlaunch run")
    assert tuned() == 0
    assert [one["credited"] for one in result()["remedies"]] == [False, True, True]
    assert len(written()["starts"]) == machine.starts


def test_logs_are_left_of_what_failed_and_of_what_the_walk_ends_in(machine, monkeypatch):
    def start(_, wanted, *, number, **__):
        Path(f"logs/mine-{number}").mkdir(parents=True)
        return machine.start(wanted)

    machine.problems = {"noop": "it crashed"}
    monkeypatch.setattr(Measurer, "start", start)
    tuned()
    starts = [*enumerate(written()["starts"], start=1)]
    [failed] = [number for number, one in starts if one["problem"]]
    last = {tuple(one["remedies"]): number for number, one in starts}
    ends = last["fast",], last["fast", "local"]
    assert {folder.name for folder in Path("logs").iterdir()} == {f"mine-{number}" for number in (failed, *ends)}


def test_as_many_minutes_as_are_named_are_enough_to_go_on(machine, capsys):
    tuned(minutes=2.0)
    assert result()["not_tried"]
    [minutes] = re.findall(r"--minutes (\d+)", capsys.readouterr().out)
    tuned(minutes=float(minutes) + 1)
    assert not result()["not_tried"]


def test_a_program_that_fails_as_it_is_or_has_no_time_is_not_tuned(machine):
    for seconds, error, says in ((1.0, LaunchError, "it crashed"), (100.0, CommandError, "--minutes 1")):
        machine.start = lambda _, took_s=seconds: tune.Start(rate=0.0, seconds=took_s, problem="it crashed")
        with pytest.raises(error, match=says):
            tuned(minutes=1.0)
    del machine.start  # what was wrong is mended
    assert tuned() == 0


def test_a_file_of_another_program_is_not_continued(machine):
    tuned()
    with pytest.raises(CommandError, match="another np"):
        tuned(np=3)
    known = written()
    for wrong in ([], {**known, "starts": [{}]}, {**known, "starts": [{**known["starts"][0], "rate": 0}]}):
        (FOLDER / "tune.json").write_text(json.dumps(wrong))
        with pytest.raises(CommandError, match="--name"):
            tuned()


@pytest.mark.parametrize(
    ("name", "value"), [("minutes", 0.0), ("minutes", float("nan")), ("confirm_seeds", -1), ("name", "../up")]
)
def test_what_makes_no_sense_is_refused_before_anything_starts(name, value, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CommandError, match=f"--{name.replace('_', '-')}"):
        tuned(**{name: value})


def test_hosts_with_errors_are_not_tuned(machine, monkeypatch):
    monkeypatch.setattr(tune.hosts, "check", lambda *_, **__: SimpleNamespace(findings=(), status=1))
    with pytest.raises(LaunchError, match="hvdlaunch check"):
        tuned()
    assert machine.starts == 0


def test_a_second_walk_of_one_name_is_refused(machine):
    with held(FOLDER), pytest.raises(CommandError, match="--name mine: in use by process"):
        tuned()
    assert machine.starts == 0
