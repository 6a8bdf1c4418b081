"""How a run ends, with a launcher that is none: `Launcher` here does what the test says, and notes its signals."""

import json
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from launch.errors import ProcessError
from launch.process import PIPE
from launch.supervise import run, screen
from tests.terminal import Pty
from tests.unit.supervise.test_mpirun_output import STATUS_3

USR1, TERM, INT, HUP = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def written(text):
    """A pipe into which somebody has written this."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return os.fdopen(reader, "rb")


class FakeLauncher:
    """Ends with the status of the first rule that holds: (after these signals, status)."""

    report: ClassVar[dict[str, str]] = {}
    after: ClassVar[dict[tuple[int, ...], int]] = {}
    stderr: ClassVar[bytes] = b""

    def __init__(self, argv, *, env, folder, out):
        self.signals, self.ended, self.out = [], False, out
        (folder / "report.json").write_text(json.dumps(self.report))
        self.errors = written(self.stderr)
        self.output = written(b"printed\n") if out == PIPE else None
        made.append(self)

    def signal(self, number):
        self.signals.append(number)

    def wait(self, timeout_s):
        time.sleep(0.01)
        return self.after.get(tuple(self.signals))

    def end(self):
        self.ended = True


made: list[FakeLauncher] = []


@pytest.fixture(autouse=True)
def launcher(monkeypatch, tmp_path):
    made.clear()
    monkeypatch.setattr(run, "Launcher", FakeLauncher)
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    for name, value in (("report", {}), ("after", {}), ("stderr", b"")):
        monkeypatch.setattr(FakeLauncher, name, value)
    yield FakeLauncher
    for fake in made:
        fake.errors.close()
        if fake.output is not None:
            fake.output.close()


@pytest.fixture(autouse=True)
def handlers():
    """What hvdlaunch does between runs; here it must not come to that."""
    arrived: list[int] = []

    def handler(number, _):
        arrived.append(number)

    before = {number: signal.signal(number, handler) for number in (USR1, TERM, INT, HUP)}
    yield
    assert {signal.signal(number, own) for number, own in before.items()} == {handler}
    assert arrived == []


PREPARED = SimpleNamespace(
    argv=["mpirun"],
    environment={"HVDLAUNCH_JOB": "mine"},
    plan=SimpleNamespace(
        network=None, elastic=False, slots=[SimpleNamespace(rank=rank, host="h1") for rank in range(3)]
    ),
    launcher=SimpleNamespace(ssh=SimpleNamespace(ask=lambda *_, **__: '""'), python="python"),
)
SAVES = {"saves": "yes", "run_folder": "/runs/mine", "checkpoint": "40"}


def ended(*signals, grace_s=5.0, prepared=PREPARED, out=None):
    """A run that gets these signals: (seconds after it has begun, number)."""

    def send():
        began = time.monotonic()
        for after_s, number in signals:
            time.sleep(max(0.0, began + after_s - time.monotonic()))
            os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    try:
        return run.run(prepared, grace_s=grace_s, out=out)
    finally:
        sender.join()
        assert made[-1].ended


@pytest.mark.parametrize("number", [TERM, INT, HUP, USR1])
def test_a_program_that_can_save_is_asked_to_and_has_ended_well(launcher, capfd, number):
    launcher.report, launcher.after = {**SAVES, "exit_reason": "preempted"}, {(USR1,): 0}
    end = ended((0.05, number))
    assert made[0].signals == [USR1]
    line = "note: stopped and saved at step 40. To resume, run the same command with HVDLAUNCH_JOB=mine before it."
    assert (end.status, end.stopped, end.checkpoint, end.run_folder, end.why) == (0, True, 40, "/runs/mine", line)
    assert capfd.readouterr().err == f"hvdlaunch: {line}\n"


@pytest.mark.parametrize("number", [TERM, INT, HUP])
def test_a_program_that_cannot_save_is_ended(launcher, capfd, number):
    launcher.after = {(TERM,): 143}
    end = ended((0.05, number))
    assert made[0].signals == [TERM]
    assert (end.status, end.stopped, end.why) == (128 + number, True, f"stopped by {signal.Signals(number).name}")
    assert capfd.readouterr().err == ""


def test_before_it_can_save_sigusr1_is_passed_on_and_does_not_end_it(launcher):
    launcher.after = {(USR1, USR1, TERM): 1}
    end = ended((0.05, USR1), (0.1, USR1), (0.15, TERM))
    assert (end.status, end.stopped) == (143, True)


def test_a_program_that_obeys_a_sigusr1_that_came_early_was_stopped(launcher):
    launcher.report, launcher.after = {"exit_reason": "preempted"}, {(USR1,): 0}
    end = ended((0.05, USR1))
    assert (end.status, end.stopped, end.checkpoint) == (0, True, None)
    assert end.why.startswith("note: stopped and saved.")
    assert "HVDLAUNCH_JOB=mine" in end.why


def test_the_second_signal_ends_it_now(launcher):
    launcher.report = SAVES
    began = time.monotonic()
    end = ended((0.05, INT), (0.5, INT), grace_s=60)
    assert time.monotonic() - began < 50
    assert made[0].signals == [USR1]
    assert (end.status, end.stopped, end.why) == (130, True, "stopped by SIGINT")


def test_two_signals_at_once_are_one_and_sigusr1_is_never_the_second(launcher):
    launcher.report = SAVES
    began = time.monotonic()
    ended((0.05, TERM), (0.1, TERM), (0.6, USR1), (0.9, HUP), grace_s=60)
    assert 0.8 < time.monotonic() - began < 50  # by SIGHUP, not by the second SIGTERM or the end of the grace
    assert made[0].signals == [USR1]


def test_the_deadline_ends_it(launcher):
    launcher.report = SAVES
    began = time.monotonic()
    end = ended((0.05, TERM), grace_s=0.4)
    assert 0.4 < time.monotonic() - began < 3
    assert (end.status, end.stopped) == (143, True)


def test_who_has_started_it_may_end_it_without_a_word(launcher, capfd):
    end = run.run(PREPARED, until=lambda: True)
    assert made[-1].ended
    assert (end.status, end.stopped, end.why) == (1, False, None)
    assert capfd.readouterr().err == ""


def test_a_failure_while_it_saves_is_told(launcher, capfd):
    launcher.report, launcher.after, launcher.stderr = {"saves": "yes"}, {(USR1,): 3}, STATUS_3
    assert ended((0.05, TERM)).status == 143
    assert capfd.readouterr().err == "hvdlaunch: error: rank 2 on h1 ended with status 3\n"


def test_a_run_that_finishes_before_it_hears_the_signal_has_finished(launcher, capfd):
    launcher.report, launcher.after = {**SAVES, "exit_reason": "finished"}, {(USR1,): 0}
    end = ended((0.05, TERM))
    assert (end.status, end.stopped, end.why) == (0, True, None)
    assert capfd.readouterr().err == ""


def test_without_a_signal(launcher, capfd):
    launcher.after, launcher.report = {(): 0}, SAVES
    end = ended()
    assert (end.status, end.stopped, end.why, end.checkpoint) == (0, False, None, 40)
    launcher.after, launcher.report, launcher.stderr = {(): 3}, {"checkpoint": "x"}, STATUS_3
    end = ended()
    assert (end.status, end.stopped, end.why, end.checkpoint) == (3, False, "rank 2 on h1 ended with status 3", None)
    assert capfd.readouterr().err == "hvdlaunch: error: rank 2 on h1 ended with status 3\n"


def test_a_launcher_that_cannot_start_leaves_the_signals_as_they_were(monkeypatch):
    def cannot(*_, **__):
        raise ProcessError("mpirun cannot be started: No such file or directory")

    monkeypatch.setattr(run, "Launcher", cannot)
    with pytest.raises(ProcessError):
        run.run(PREPARED)


@pytest.mark.parametrize(
    ("reason", "statuses"),
    [
        ("finished", (0, 0)),
        ("finished", (137, 0)),  # a newcomer was killed, and others went on
        ("preempted", (0, 0)),
        ("failed", (0, 1)),  # no rank is left
        ("failed", (3, 3)),
        (None, (0, 1)),
    ],
    ids=str,
)
def test_an_elastic_run_has_ended_well_if_it_has_come_to_its_end(launcher, monkeypatch, capsys, reason, statuses):
    """Whatever Open MPI 5's mpirun ends with."""
    of_mpirun, status = statuses
    monkeypatch.setattr(run, "explain", lambda *_, **__: "all are gone")
    launcher.after = {(): of_mpirun}
    launcher.report = {"run_folder": "/runs/mine"} | ({} if reason is None else {"exit_reason": reason})
    elastic = SimpleNamespace(**vars(PREPARED.plan) | {"elastic": True})
    done = run.run(SimpleNamespace(**vars(PREPARED) | {"plan": elastic}))
    assert done.status == status
    assert bool(capsys.readouterr().err) == (reason in ("preempted", "failed", None))


@pytest.mark.parametrize(
    ("hosts", "out", "term"),
    [
        ("h1 h1 h2", None, "xterm"),
        ("h1 h1 h1", None, "xterm"),
        ("h1 h1 h2", 1, "xterm"),  # for a program that reads it
        ("h1 h1 h2", None, "dumb"),
    ],
)
def test_on_several_hosts_a_terminal_shows_where_the_job_stands(launcher, monkeypatch, hosts, out, term):
    monkeypatch.setattr(screen, "DRAW_S", 0.02)
    monkeypatch.setenv("TERM", term)
    pty, launcher.after, launcher.stderr = Pty(), {(TERM,): 143}, b"of a rank\n"
    slots = [SimpleNamespace(rank=rank, host=host) for rank, host in enumerate(hosts.split())]
    plan = SimpleNamespace(**vars(PREPARED.plan) | {"slots": slots, "apart": ()})
    with os.fdopen(pty.end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        end = ended((0.1, INT), prepared=SimpleNamespace(**vars(PREPARED) | {"plan": plan}), out=out)
    is_drawn = (hosts, out, term) == ("h1 h1 h2", None, "xterm")
    assert (end.status, made[0].out) == (130, PIPE if is_drawn else out)
    assert sorted(pty.settled()) == ["", "of a rank", *(["printed"] if is_drawn else [])]
    assert ("hvdlaunch: 0 of 2 hosts, 0 of 3 ranks up" in pty.text) == is_drawn
