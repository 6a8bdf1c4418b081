"""How a run ends, with a launcher that is none: `Launcher` here does what the test says, and notes its signals."""

import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import ClassVar

import pytest

from launch.errors import ProcessError
from launch.process import PIPE
from launch.start.launchers.openmpi import MESSAGES
from launch.supervise import run, screen
from tests.terminal import Pty
from tests.unit.supervise.test_launcher_output import LOST, STATUS_3

USR1, TERM, INT, HUP = signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def written(text):
    """A pipe into which somebody has written this."""
    reader, writer = os.pipe()
    os.write(writer, text)
    os.close(writer)
    return os.fdopen(reader, "rb")


class FakeLauncher:
    """Ends with the status that belongs to the signals which it got; while it runs, `coming` reach hvdlaunch."""

    report: ClassVar[dict[str, str]] = {}
    after: ClassVar[dict[tuple[int, ...], int]] = {}
    stderr: ClassVar[bytes] = b""
    coming: ClassVar[list[int]] = []

    def __init__(self, argv, *, env, folder, out, receivers):
        self.signals, self.ended, self.out = [], False, out
        (folder / "report.json").write_text(json.dumps(self.report))
        self.errors = written(self.stderr)
        self.output = written(b"printed\n") if out == PIPE else None
        made.append(self)

    def signal(self, number):
        self.signals.append(number)

    def wait(self, timeout_s):
        time.sleep(0.01)
        if self.coming and self.is_ready():
            signal.raise_signal(self.coming.pop(0))
        return self.after.get(tuple(self.signals))

    def is_ready(self):
        return True

    def end(self):
        self.ended = True


made: list[FakeLauncher] = []


@pytest.fixture(autouse=True)
def launcher(monkeypatch, tmp_path):
    made.clear()
    monkeypatch.setattr(run, "Launcher", FakeLauncher)
    monkeypatch.setattr(run.HandOn, "start", lambda _: made[0].signals.append("handed on"))
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    for name, value in (("report", {}), ("after", {}), ("stderr", b"")):
        monkeypatch.setattr(FakeLauncher, name, value)
    yield FakeLauncher
    for fake in made:
        assert fake.ended
        for stream in filter(None, (fake.errors, fake.output)):
            stream.close()


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


SLOTS = [SimpleNamespace(rank=rank, host=host) for rank, host in enumerate(("h1", "h1", "h2"))]
PLAN = {"network": None, "slots": SLOTS, "apart": (), "mca": ()}
SAVES = {"saves": "yes", "run_folder": "/runs/mine", "checkpoint": "40"}


def ended(*signals, grace_s=60.0, out=None, elastic=False, **plan):
    """A run that gets these signals."""
    FakeLauncher.coming = list(signals)
    prepared = SimpleNamespace(
        argv=["mpirun"],
        environment={"HVDLAUNCH_JOB": "mine"},
        plan=SimpleNamespace(**PLAN | plan, request=SimpleNamespace(elastic=elastic)),
        launcher=SimpleNamespace(
            ssh=SimpleNamespace(ask=lambda *_, **__: '""'), python="python", messages=MESSAGES, receivers=("mpirun",)
        ),
    )
    return run.run(prepared, grace_s=grace_s, out=out, until=lambda: "gone" in FakeLauncher.report)


@pytest.mark.parametrize("number", [TERM, HUP, USR1])
def test_a_program_that_can_save_is_asked_to_and_has_ended_well(launcher, capfd, number):
    launcher.report, launcher.after = {**SAVES, "exit_reason": "preempted"}, {(USR1,): 0}
    end = ended(number)
    line = "note: stopped and saved at step 40. To resume, run the same command with HVDLAUNCH_JOB=mine before it."
    assert (end.status, end.stopped, end.checkpoint, end.run_folder, end.why) == (0, True, 40, "/runs/mine", line)
    assert capfd.readouterr().err == f"hvdlaunch: {line}\n"


@pytest.mark.parametrize("number", [TERM, INT])
def test_a_program_that_cannot_save_is_ended(launcher, capfd, number):
    launcher.after = {(TERM,): 143}
    end = ended(number)
    assert (end.status, end.stopped, end.why) == (128 + number, True, f"stopped by {signal.Signals(number).name}")
    assert capfd.readouterr().err == ""


def test_before_it_can_save_sigusr1_is_handed_on_and_does_not_end_it(launcher):
    launcher.after = {("handed on", "handed on", TERM): 1}
    end = ended(USR1, USR1, TERM)
    assert (end.status, end.stopped) == (143, True)


def test_a_program_that_obeys_a_sigusr1_that_came_early_was_stopped(launcher):
    launcher.report, launcher.after = {"exit_reason": "preempted"}, {("handed on",): 0}
    end = ended(USR1)
    assert (end.status, end.stopped, end.checkpoint) == (0, True, None)
    assert end.why.startswith("note: stopped and saved. To resume")


@pytest.mark.parametrize(
    ("report", "kept"), [(SAVES, "the checkpoint of step 40 is kept"), ({"saves": "yes"}, "nothing is saved")]
)
def test_the_deadline_ends_it_with_what_was_kept(launcher, capfd, report, kept):
    launcher.report = report
    end = ended(TERM, grace_s=0.1)
    assert f"hvdlaunch: note: stopped before the ranks could save: {kept}. To resume, " in capfd.readouterr().err
    assert made[0].signals == [USR1]
    assert (end.status, end.stopped, end.why) == (143, True, "stopped by SIGTERM")


def test_who_has_started_it_may_end_it_without_a_word(launcher, capfd):
    launcher.report = {"gone": "yes"}
    end = ended()
    assert (end.status, end.stopped, end.why) == (1, False, None)
    assert capfd.readouterr().err == ""


def test_a_failure_while_it_saves_is_told(launcher, capfd):
    launcher.report, launcher.after, launcher.stderr = {"saves": "yes"}, {(USR1,): 3}, STATUS_3
    assert ended(TERM).status == 143
    assert capfd.readouterr().err == "hvdlaunch: error: rank 2 on h2 ended with status 3\n"


def test_a_run_that_finishes_before_it_hears_the_signal_has_finished(launcher, capfd):
    launcher.report, launcher.after = {**SAVES, "exit_reason": "finished"}, {(USR1,): 0}
    end = ended(TERM)
    assert (end.status, end.stopped, end.why) == (0, True, None)
    assert capfd.readouterr().err == ""


def test_without_a_signal_its_status_is_the_launchers_unless_a_host_was_lost(launcher, capfd):
    launcher.after, launcher.report = {(): 0}, SAVES
    end = ended()
    assert (end.status, end.stopped, end.why, end.checkpoint) == (0, False, None, 40)
    launcher.stderr = LOST
    end = ended()
    assert (end.status, end.why) == (1, "host h2 no longer answers; it had rank 2")
    launcher.after, launcher.report, launcher.stderr = {(): 143}, {"checkpoint": "x"}, STATUS_3  # srun's own status
    end = ended()
    assert (end.status, end.stopped, end.why, end.checkpoint) == (3, False, "rank 2 on h2 ended with status 3", None)
    assert capfd.readouterr().err.splitlines() == [
        "hvdlaunch: error: host h2 no longer answers; it had rank 2",
        "hvdlaunch: error: rank 2 on h2 ended with status 3",
    ]


def test_a_launcher_that_cannot_start_leaves_the_signals_as_they_were(monkeypatch):
    def cannot(*_, **__):
        raise ProcessError("mpirun cannot be started: No such file or directory")

    monkeypatch.setattr(run, "Launcher", cannot)
    with pytest.raises(ProcessError):
        ended()


def test_an_elastic_run_has_ended_well_if_it_has_come_to_its_end(launcher):
    """Whatever Open MPI 5's mpirun ends with: a newcomer was killed and others went on, or no rank is left."""
    known = {("finished", 137): 0, ("failed", 0): 1, ("failed", 3): 3, (None, 0): 1}
    for (reason, of_mpirun), status in known.items():
        launcher.after = {(): of_mpirun}
        launcher.report = {"run_folder": "/runs/mine", "said": "all are gone", "exit_reason": reason}
        assert ended(elastic=True).status == status


@pytest.mark.parametrize(
    ("hosts", "out", "term"),
    [
        ("h1 h1 h2", None, "xterm"),
        ("h1 h1 h1", None, "xterm"),
        ("h1 h1 h2", 1, "xterm"),  # of a study, which prints its own results on standard output
        ("h1 h1 h2", None, "dumb"),
    ],
)
def test_a_terminal_shows_where_the_job_stands(launcher, monkeypatch, hosts, out, term):
    is_drawn = term == "xterm"
    pty, launcher.after, launcher.stderr = Pty(), {(TERM,): 143}, b"of a rank\n"
    status_line = f"hvdlaunch: {'0 of 2 hosts, ' if 'h2' in hosts else ''}0 of 3 ranks up"
    monkeypatch.setattr(FakeLauncher, "is_ready", lambda _: not is_drawn or status_line in pty.text)
    monkeypatch.setattr(screen, "DRAW_S", 0.02)
    monkeypatch.setenv("TERM", term)
    slots = [SimpleNamespace(rank=rank, host=host) for rank, host in enumerate(hosts.split())]
    with os.fdopen(pty.end, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(sys, "stdout", stream)
        end = ended(INT, slots=slots, out=out)
    assert (end.status, made[0].out) == (130, PIPE if is_drawn else out)
    assert sorted(pty.settled()) == ["", "of a rank", *(["printed"] if is_drawn else [])]
    assert (status_line in pty.text) == is_drawn
