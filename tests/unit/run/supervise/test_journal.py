import re
from types import SimpleNamespace

import psutil
import pytest

from launch import output
from launch.errors import CommandError
from launch.run.start.request import Attempt
from launch.run.supervise import journal
from launch.run.supervise.run import RunResult
from tests.unit.machines import request

SLOTS = [SimpleNamespace(rank=rank, host=f"h{rank}", gpu=gpu, cores=(0, 1)) for rank, gpu in ((0, 3), (1, None))]
TIME = re.compile(r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", re.MULTILINE)


@pytest.fixture
def kept(monkeypatch, tmp_path):
    """What the log has, without the times."""
    monkeypatch.chdir(tmp_path)
    log = output.Log()
    for module in (output, journal):
        monkeypatch.setattr(module, "log", log)

    def read():
        lines = (tmp_path / "logs/mine/hvdlaunch.log").read_text().splitlines()
        assert all(map(TIME.match, lines))
        return [TIME.sub("", line) for line in lines]

    return read


def test_a_job_of_the_same_name_is_refused_as_long_as_one_runs(kept, tmp_path):
    mine = {"HVDLAUNCH_JOB": "mine"}
    for _ in range(2):
        in_use = pytest.raises(CommandError, match=r"^HVDLAUNCH_JOB=mine: in use by process")
        with journal.alone(mine), journal.alone({}), journal.alone({"HVDLAUNCH_JOB": "other"}), in_use:
            journal.alone(mine).__enter__()
    (tmp_path / "logs").write_text("a file in the place of the folder")
    with journal.alone(mine):
        pass


def attempt(number):
    plan = SimpleNamespace(slots=SLOTS, request=request(attempt=Attempt(restart=number)))
    return SimpleNamespace(argv=["mpirun", "a b"], environment={"HVDLAUNCH_JOB": "mine"}, plan=plan)


def test_the_log_has_what_was_printed_before_what_started_where_and_how_it_ended(kept, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(journal.sys, "argv", ["hvdlaunch", "run", "--", "sh", "-c", "a\nb"])
    output.say("note: before")
    journal.begin(attempt(0))
    output.log.add(b"10 %\r20 %\rwhole\nha")
    output.log.add(b"lf\n")
    (tmp_path / "ranks").mkdir()
    (tmp_path / "ranks/rank-1.at").write_text(f"{'step 7 waiting':<63}\n")
    journal.end(attempt(0), RunResult(status=3, run_folder=str(tmp_path), why="rank 0 failed", stopped=False))
    opened = psutil.Process().num_fds()
    journal.begin(attempt(1))
    assert psutil.Process().num_fds() == opened
    places = ["rank 0: h0, GPU 3, cores 0-1", "rank 1: h1, no GPU, cores 0-1"]
    started = ["hvdlaunch run -- sh -c 'a\\nb'", *["attempt 0", *places, "starting: mpirun 'a b'"]]
    ended = ["ended with status 3: rank 0 failed", f"run folder: {tmp_path}", "rank 1: waited for others at step 7"]
    again = [started[0], "attempt 1", *started[2:]]
    assert kept() == ["hvdlaunch: note: before", *started, "whole", "half", *ended, *again]
    assert capsys.readouterr().err == "hvdlaunch: note: before\n"


def test_without_room_on_the_disk_nothing_is_kept_and_nothing_fails(kept, tmp_path, monkeypatch):
    (tmp_path / "logs").touch()
    journal.begin(attempt(0))
    monkeypatch.setattr(output, "MOST_KEPT", 5)
    small = output.Log()
    small.keep_in(tmp_path / "small.log")
    small.add(b"x" * 100 + b"\n")
    small.add(b"more\n")
    assert len((tmp_path / "small.log").read_bytes()) == 5
