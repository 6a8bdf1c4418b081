"""How a run ends, with a launcher that is none: `Launcher` here does what the test says, and notes its signals."""

import json
import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import ClassVar
from unittest.mock import Mock

import pytest

from launch.errors import ProcessError
from launch.process import PIPE
from launch.run.start.launchers.openmpi import MESSAGES
from launch.run.supervise import run, screen
from tests.terminal import Pty
from tests.unit.run.supervise.test_launcher_output import LOST, STATUS_3

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
    alone: ClassVar[bool] = False

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

    def is_alone(self):
        return self.alone

    def end(self):
        self.ended = True


made: list[FakeLauncher] = []


@pytest.fixture(autouse=True)
def launcher(monkeypatch, tmp_path):
    made.clear()
    monkeypatch.setattr(run, "LauncherProcess", FakeLauncher)
    monkeypatch.setattr(run.HandOn, "start", lambda _: made[0].signals.append("handed on"))
    monkeypatch.setattr(run.tempfile, "mkdtemp", lambda **_: str(tmp_path))
    for name, value in (("report", {}), ("after", {}), ("stderr", b""), ("alone", False)):
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
PLAN = {"network": None, "slots": SLOTS, "apart": (), "mca": (), "local": frozenset({"h1"})}
SAVES = {"saves": "yes", "run_folder": "/runs/mine", "checkpoint": "40"}


def ended(*signals, grace_s=60.0, out=None, name="mpirun", growth=None, **plan):
    """A run that gets these signals."""
    FakeLauncher.coming = list(signals)
    prepared = SimpleNamespace(
        argv=["mpirun"],
        environment={"HVDLAUNCH_JOB": "mine"},
        plan=SimpleNamespace(**PLAN | plan, request=SimpleNamespace(spot=None, after_checkpoint=None)),
        launcher=SimpleNamespace(
            ssh=SimpleNamespace(ask=lambda *_, **__: '""'),
            python="python",
            messages=MESSAGES,
            receivers=("mpirun",),
            name=name,
        ),
    )
    until = lambda: "gone" in FakeLauncher.report  # noqa: E731
    return run.run(prepared, grace_s=grace_s, out=out, until=until, growth=growth)


@pytest.mark.parametrize(("name", "status"), [("mpirun", 1), ("srun", 143)])
def test_an_mpirun_that_is_left_alone_has_failed(launcher, name, status):
    launcher.alone, launcher.after, launcher.stderr = True, {(TERM,): 143}, LOST
    assert ended(*([] if name == "mpirun" else [TERM]), name=name).status == status


SAVED = "note: stopped and saved{}. To resume, run the same command with HVDLAUNCH_JOB=mine before it."
AT_40, EARLY = SAVED.format(" at step 40"), SAVED.format("")
PREEMPTED, FINISHED = ({**SAVES, "exit_reason": reason} for reason in ("preempted", "finished"))
RANK_2, H2 = "rank 2 on h2 ended with status 3", "host h2 no longer answers; it had rank 2"


@pytest.mark.parametrize(
    ("signals", "report", "after", "stderr", "end", "said"),
    [
        *(([number], PREEMPTED, {(USR1,): 0}, b"", (0, True, 40, AT_40), AT_40) for number in (TERM, HUP, USR1)),
        ([TERM], {"saves": "yes"}, {(USR1,): 3}, STATUS_3, (143, True, None, "stopped by SIGTERM"), f"error: {RANK_2}"),
        ([TERM], FINISHED, {(USR1,): 0}, b"", (0, True, 40, None), None),  # before it has heard the signal
        # It cannot save, or not yet: SIGUSR1 is handed on.
        ([TERM], {}, {(TERM,): 143}, b"", (143, True, None, "stopped by SIGTERM"), None),
        ([INT], {}, {(TERM,): 143}, b"", (130, True, None, "stopped by SIGINT"), None),
        ([USR1], {"exit_reason": "preempted"}, {("handed on",): 0}, b"", (0, True, None, EARLY), EARLY),
        # Without a signal the status is the launcher's, unless a host was lost, or that of the rank that srun names.
        ([], SAVES, {(): 0}, b"", (0, False, 40, None), None),
        ([], SAVES, {(): 0}, LOST, (1, False, 40, H2), f"error: {H2}"),
        ([], FINISHED, {(): 137}, b"", (0, False, 40, None), None),  # mpirun was killed at the end
        ([], FINISHED, {(): 3}, STATUS_3, (3, False, 40, RANK_2), f"error: {RANK_2}"),
        ([], {"checkpoint": "x"}, {(): 143}, STATUS_3, (3, False, None, RANK_2), f"error: {RANK_2}"),
        ([], {"gone": "yes"}, {}, b"", (1, False, None, None), None),  # whoever has started it has ended it
    ],
)
def test_how_a_run_ends(launcher, capfd, *, signals, report, after, stderr, end, said):
    launcher.report, launcher.after, launcher.stderr = report, after, stderr
    found = ended(*signals)
    assert (found.status, found.stopped, found.checkpoint, found.why) == end
    assert found.run_folder == report.get("run_folder")
    assert (found.host, found.is_host_lost) == ("h2" if stderr else None, stderr == LOST)
    assert capfd.readouterr().err == (f"hvdlaunch: {said}\n" if said else "")


@pytest.mark.parametrize(
    ("host", "report", "others_continue", "why"),
    [
        ("h2", PREEMPTED, True, "host h2: the end"),
        ("h1", PREEMPTED, False, "host h1: the end"),  # with hvdlaunch itself
        ("h2", FINISHED, False, None),
    ],
)
def test_a_notice_stops_the_run_as_sigterm_does(launcher, monkeypatch, *, host, report, others_continue, why):
    launcher.report, launcher.after = report, {(USR1,): 0}
    monkeypatch.setattr(run.Notices, "poll", lambda self: self.hosts.update({host: "the end"}) or True)
    end = ended()
    assert (end.status, end.stopped, end.is_for_notice, end.why, end.host) == (0, True, others_continue, why, None)


@pytest.mark.parametrize(
    ("report", "signals", "stopped", "new_hosts"),
    [
        (PREEMPTED, [USR1], True, ("h2",)),
        (FINISHED, [USR1], True, ()),
        ({}, [], False, ()),  # it would lose what it has done since its last checkpoint
    ],
)
def test_new_hosts_stop_a_program_that_saves(launcher, capfd, *, report, signals, stopped, new_hosts):
    launcher.report, launcher.after = report, {tuple(signals): 0}
    end = ended(growth=SimpleNamespace(hosts=("h2",), poll=lambda: True))
    assert (end.status, end.stopped, end.new_hosts, end.is_for_notice) == (0, stopped, new_hosts, False)
    assert not capfd.readouterr().err


@pytest.mark.parametrize(
    ("report", "kept"), [(SAVES, "the checkpoint of step 40 is kept"), ({"saves": "yes"}, "nothing is saved")]
)
def test_the_deadline_ends_it_with_what_was_kept(launcher, capfd, report, kept):
    launcher.report = report
    end = ended(TERM, grace_s=0.1)
    assert f"hvdlaunch: note: stopped before the ranks could save: {kept}. To resume, " in capfd.readouterr().err
    assert made[0].signals == [USR1]
    assert (end.status, end.stopped, end.why) == (143, True, "stopped by SIGTERM")


def test_a_launcher_that_cannot_start_leaves_the_signals_as_they_were(monkeypatch):
    monkeypatch.setattr(run, "LauncherProcess", Mock(side_effect=ProcessError("mpirun cannot be started")))
    with pytest.raises(ProcessError):
        ended()


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
