import json
import os
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from launch.errors import HostError
from launch.run.supervise.rank_logs import END_BYTES, Logs, RankReport, end_of, read_report

TRACKER = b"""/lib/multiprocessing/resource_tracker.py:254: UserWarning: resource_tracker: There appear to be 14 leaked
  warnings.warn('resource_tracker: There appear to be %d '
"""
SPAWNED = b"""Traceback (most recent call last):
  File "<string>", line 1, in <module>
  File "/lib/multiprocessing/spawn.py", line 122, in spawn_main
    exitcode = _main(fd, parent_sentinel)
               ^^^^^^^^^^^^^^^^^^^^^^^^^^
FileNotFoundError: [Errno 2] No such file or directory
"""
KEY_ERROR = 'Traceback (most recent call last):\n  File "a.py"\nKeyError'


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (b"one\ntwo\n\n", "one\ntwo"),
        (b"\r 10%\r 20%\r\nValueError: \xff\n", " 20%\nValueError: \ufffd"),
        (b"x" * 100_000, "x" * END_BYTES),
        (b"KeyError: 'a'\n" + TRACKER, "KeyError: 'a'"),
        (b"KeyError: 'a'\n\n" + SPAWNED + TRACKER, "KeyError: 'a'"),
        (KEY_ERROR.encode() + b"\n" + SPAWNED, KEY_ERROR),
        (SPAWNED, SPAWNED.decode().rstrip()),  # the only reason there is
    ],
)
def test_the_end_of_a_log_as_it_looks_on_a_terminal(tmp_path, written, read):
    (tmp_path / "log").write_bytes(written)
    assert end_of(tmp_path / "log") == read


def test_what_is_no_log_has_no_words(tmp_path):
    (tmp_path / "secret").write_text("secret")
    (tmp_path / "link").symlink_to(tmp_path / "secret")
    os.mkfifo(tmp_path / "pipe")
    for planted in (tmp_path / "nothing", tmp_path / "link", tmp_path / "pipe", tmp_path, Path("/dev/zero")):
        assert end_of(planted) == ""


def test_a_host_is_asked_for_the_log_of_its_rank(tmp_path):
    log, ask = tmp_path / "rank-3.log", Mock(return_value=json.dumps("its end"))
    log.write_text("of an earlier run, here\n")
    logs = Logs(folder=tmp_path, python="/bin/python", ssh=SimpleNamespace(ask=ask))
    assert logs.end(SimpleNamespace(rank=3, host="h9.invalid")) == "its end"
    assert logs.end(SimpleNamespace(rank=3, host="localhost")) == "of an earlier run, here"
    ((host, words, _),) = [one.args for one in ask.mock_calls]
    assert (host, words) == ("h9.invalid", ["/bin/python", "-P", "-m", "launch.run.supervise.rank_logs", str(log)])


@pytest.mark.parametrize("answer", [HostError("host h2: no route to it"), "{", "[" * 100_000])
def test_a_host_that_does_not_tell_costs_nothing(tmp_path, answer):
    logs = Logs(folder=tmp_path, python="python", ssh=Mock(ask=Mock(side_effect=[answer])))
    assert logs.end(SimpleNamespace(rank=3, host="h9.invalid")) == ""


@pytest.mark.parametrize("text", [b"{", b"[1, 2]", b"\xff\xfe", b"[" * 200_000])
def test_a_report_that_is_none_says_nothing(tmp_path, text):
    path = tmp_path / "report.json"
    path.write_bytes(text)
    assert read_report(path) == read_report(tmp_path / "missing") == RankReport()


def test_a_report_tells_what_the_launcher_must_know(tmp_path):
    path = tmp_path / "report.json"
    known = {"run_folder": "/runs/mine", "exit_reason": "preempted"}
    path.write_text(json.dumps({**known, "saves": "yes", "checkpoint": "40", "snapshot": "44", "said": "bye"}))
    assert read_report(path) == RankReport(**known, saves=True, checkpoint=40, snapshot=44, explanation="bye")
    path.write_text(json.dumps({"saves": "no", "checkpoint": "x", "said": ["bye"], "run_folder": {}, "exit_reason": 1}))
    assert read_report(path) == RankReport()
