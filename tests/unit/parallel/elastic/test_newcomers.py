import json
import os
import subprocess
import sys
import threading
import time
from unittest.mock import Mock

import pytest

from hvdtrain.parallel.elastic import newcomers
from hvdtrain.parallel.elastic.newcomers import Invitation, Newcomers, make_command, read_invitation, wait_to_join
from hvdtrain.settings.safety import exits
from tests.refusals import require_facts

VALUE = "of the owner alone"


def invitation(run, number=3, place=1):
    hosts, facts = ["h0", "h1", "h2"], {"--seed": "1"}
    return Invitation(number=number, place=place, hosts=hosts, run=str(run), facts=facts, parent_pid=os.getpid())


def test_a_newcomer_is_this_program_in_this_environment(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "show.py").write_text(
        "import json, os, sys; print(json.dumps([sys.argv[1:], os.getcwd(), *os.environ.items()]))"
    )
    given = {
        "HVDLAUNCH_RANK": json.dumps({"command": [sys.executable, str(tmp_path / "show.py"), "a b"]}),
        "TOKEN": VALUE,
        "OMPI_MCA_btl": "self,tcp",
        "OMPI_COMM_WORLD_RANK": "1",
        "PMIX_RANK": "1",
    }
    words = make_command(invitation(tmp_path), given)
    assert VALUE not in " ".join(words)
    own = {"PATH": os.environ["PATH"], "OMPI_COMM_WORLD_RANK": "0"}
    done = subprocess.run(words, env=own, cwd="/", capture_output=True, text=True, check=True, timeout=60)
    argv, folder, *environment = json.loads(done.stdout)
    environment = dict(environment)
    expected = {"TOKEN": VALUE, "OMPI_MCA_btl": "self,tcp", "OMPI_COMM_WORLD_RANK": "0"}
    assert (argv, folder) == (["a b"], str(tmp_path))
    assert environment.items() >= expected.items()
    assert json.loads(environment["HVDLAUNCH_RANK"])["place"] == 1
    assert "PMIX_RANK" not in environment
    assert read_invitation(environment) == invitation(tmp_path)
    assert read_invitation({}) is None
    assert int((tmp_path / "newcomer-3.json").read_text()) > 0  # its process id, and nothing of the environment


class Bridge:
    """In place of MPI's communicator to newcomers, or to the rank that has invited this one."""

    def __init__(self, *tags, fails=None):
        self.tags, self.fails, self.sent, self.freed = list(tags), fails, [], False

    def Iprobe(self, source, tag):  # noqa: N802 (MPI's names)
        if self.fails is not None:
            raise self.fails
        return tag in self.tags

    def recv(self, source, tag):
        return "the port"

    def send(self, value, whom, tag):
        self.sent.append((value, whom, tag))

    def Free(self):  # noqa: N802
        self.freed = True


@pytest.fixture
def starts(monkeypatch):
    """What each start of newcomers returns, or raises; whom they were on which hosts."""
    coming, started = [], []

    def start(programs, hosts):
        started.append((len(programs), hosts))
        found = coming.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(newcomers.connect, "start_newcomers", start)
    monkeypatch.setattr(newcomers.connect, "open_port", lambda: "a port")
    monkeypatch.setattr(newcomers, "_process_of", lambda file: file if file.exists() else None)
    monkeypatch.setattr(newcomers, "LEAST_PAUSE_S", 0.01)
    return coming, started


def test_those_who_are_ready_are_told_where_to_join(starts, tmp_path, capsys):
    coming, started = starts
    bridge = Bridge(1)
    coming.append(bridge)
    these = Newcomers((ConnectionError,))
    these.invite(lambda: [invitation(tmp_path, 3, 1), invitation(tmp_path, 4, 2)])
    assert these.ready.wait(10)
    assert started == [(2, ["h1", "h2"])]
    assert these.send_port() == "a port"
    assert [(value, whom) for value, whom, _ in bridge.sent] == [("a port", 0), ("a port", 1)]
    assert (these.ready.is_set(), bridge.freed, capsys.readouterr().err) == (False, True, "")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("found", [ConnectionError("no slot"), Bridge(fails=ConnectionError("it was lost"))])
def test_who_has_not_come_is_invited_again(starts, tmp_path, capsys, found):
    coming, started = starts
    coming += [found, Bridge(1)]
    these = Newcomers((ConnectionError,))
    these.invite(lambda: [invitation(tmp_path)])
    assert these.ready.wait(10)
    assert len(started) == 2
    [line] = capsys.readouterr().err.splitlines()
    reason = found if isinstance(found, Exception) else found.fails
    require_facts(line, f"hvdtrain: warning: ... rank 1 ... {reason} ... 0 s")


def test_a_newcomer_waits_until_it_is_told(monkeypatch):
    bridge = Bridge()
    monkeypatch.setattr(newcomers.connect, "parent_comm", lambda: bridge)
    threading.Timer(0.1, bridge.tags.append, [newcomers._GO]).start()
    began = time.monotonic()
    assert wait_to_join((ConnectionError,), os.getpid()) == "the port"
    assert time.monotonic() - began > 0.09
    assert bridge.sent == [(None, 0, newcomers._READY)]


def test_a_newcomer_ends_where_who_has_invited_it_is_lost(monkeypatch):
    monkeypatch.setattr(exits, "kill_self", Mock(side_effect=SystemExit))
    monkeypatch.setattr(newcomers.connect, "parent_comm", lambda: Bridge(fails=ConnectionError()))
    with pytest.raises(SystemExit):
        wait_to_join((ConnectionError,), os.getpid())
