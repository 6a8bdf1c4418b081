import json
import os
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from launch.errors import HostError
from launch.supervise.rank_logs import END_BYTES, Logs, end_of

HERE = socket.gethostname()


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (b"one\ntwo\n\n", "one\ntwo"),
        (b"\r 10%\r 20%\r\nValueError: \xff\n", " 20%\nValueError: \ufffd"),
        (b"", ""),
        (b"x" * 100_000, "x" * END_BYTES),
    ],
)
def test_the_end_of_a_log_as_it_looks_on_a_terminal(tmp_path, written, read):
    (tmp_path / "log").write_bytes(written)
    assert end_of(tmp_path / "log") == read


@pytest.mark.parametrize("planted", ["nothing", "link", "pipe", "folder", "device"])
def test_what_is_no_log_has_no_words(tmp_path, planted):
    log = tmp_path / "log"
    if planted == "link":
        (tmp_path / "secret").write_text("secret")
        log.symlink_to(tmp_path / "secret")
    elif planted == "pipe":
        os.mkfifo(log)
    elif planted == "folder":
        log.mkdir()
    elif planted == "device":
        log = Path("/dev/zero")
    assert end_of(log) == ""


def slot(host):
    return SimpleNamespace(rank=3, host=host)


def reached(answer):
    """A host that answers so, and notes what it was asked."""
    asked = []

    def ask(host, argv, folder, *, mark, timeout_s):
        asked.append((host, argv))
        if isinstance(answer, Exception):
            raise answer
        return answer

    return SimpleNamespace(ask=ask, asked=asked)


def test_a_host_is_asked_for_the_log_of_its_rank(tmp_path):
    (tmp_path / "rank-3.log").write_text("of an earlier run, here\n")
    there = reached(json.dumps("its end"))
    logs = Logs(folder=tmp_path, python="/bin/python", ssh=there)
    assert logs.end(slot("h9.invalid")) == "its end"
    assert there.asked == [
        ("h9.invalid", ["/bin/python", "-P", "-m", "launch.supervise.rank_logs", str(tmp_path / "rank-3.log")])
    ]
    for local in ("localhost", HERE):
        assert logs.end(slot(local)) == "of an earlier run, here"
    assert len(there.asked) == 1


@pytest.mark.parametrize("answer", [HostError("host h2: no route to it"), "", "{", "[" * 100_000, "9" * 5000])
def test_a_host_that_does_not_tell_costs_nothing(tmp_path, answer):
    logs = Logs(folder=tmp_path, python="python", ssh=reached(answer))
    assert logs.end(slot("h9.invalid")) == ""
