"""Output that nobody can take: it is noted once, and costs nothing."""

import io
import logging
import os
import subprocess
import sys
from collections import Counter
from unittest.mock import Mock

import pytest

from hvdtrain.insight.tracking.console import Console
from hvdtrain.settings.safety import exits, output
from hvdtrain.settings.safety.guard import Guard
from launch import output as launchs
from launch.run.restart import fleet


class Broken(io.StringIO):
    """A stream without a reader."""

    def write(self, text):
        raise BrokenPipeError(32, "Broken pipe")

    def isatty(self):
        raise ValueError("I/O operation on closed file")


class Closed(io.StringIO):
    def write(self, text):
        raise ValueError("I/O operation on closed file")


@pytest.fixture(params=[Broken, Closed, None])
def lost(monkeypatch, request):
    """Makes streams that take nothing; returns the list of lines that are noted, None if there are no streams."""
    monkeypatch.setattr(output, "_losses", Counter())
    monkeypatch.setattr(output, "_reasons", {})
    monkeypatch.setattr(output, "_listeners", [])
    monkeypatch.setattr(launchs, "_reasons", [])
    monkeypatch.setattr(launchs, "log", launchs.Log())

    def lose():  # in the test itself: pytest sets its streams before
        for name in ("stdout", "stderr"):
            monkeypatch.setattr(sys, name, request.param and request.param())
        noted = []
        output.on_loss(noted.append)
        return noted if request.param else None

    return lose


def test_what_is_printed_for_people_raises_nothing_and_is_noted_once(lost, tmp_path):
    noted, console = lost(), Console(is_shown=True)
    for _ in range(2):
        console.print("epoch 1")
        exits.print_message("warning", "a warning")
        Guard().note("log write", "file", OSError(28, "No space left on device"))
        exits.print_error(exits.EndOfRun("saved", status=0, reason="preempted"))
        fleet.say("restart 1 of 3")
    output.draw("a line")
    output.flush()
    if noted is not None:
        out, err = noted[-1].split("; ")
        assert len(noted) == 2  # one for each stream
        assert out.startswith("standard output cannot be written: ")
        assert err.startswith("standard error cannot be written: ")
        launchs.log.keep_in(tmp_path / "hvdlaunch.log")
        assert "standard error cannot be written: " in (tmp_path / "hvdlaunch.log").read_text()


@pytest.mark.parametrize("error", [ValueError("broken"), exits.BadInput("bad"), KeyboardInterrupt()])
def test_a_rank_leaves_even_if_its_last_words_cannot_be_printed(monkeypatch, lost, error):
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(exits, "_exit_now", sys.exit)
    hook = exits._exception_hook(None, Mock(side_effect=RuntimeError("the result")))
    lost()
    with pytest.raises(SystemExit) as end:
        exits.run(Mock(side_effect=error)) if isinstance(error, exits.BadInput) else hook(type(error), error, None)
    assert end.value.code == {ValueError: 1, exits.BadInput: 2, KeyboardInterrupt: 130}[type(error)]


def test_an_answer_without_a_reader_has_status_1(lost):
    if lost() is not None:
        with pytest.raises(SystemExit) as end:
            exits.print_answer("an answer")
        assert end.value.code == 1


PROGRAM = """
import os, sys
from hvdtrain.settings.safety import output
output.guard_streams()
noted = []
output.on_loss(noted.append)
for _ in range(3):
    print("x" * 10_000, flush=True)
    print("y", file=sys.stderr)
os.write(int(sys.argv[1]), "|".join(noted).encode())
"""


@pytest.mark.parametrize(
    ("streams", "reason"),
    [(">/dev/full 2>&1", "No space left on device"), (">&- 2>&-", ""), ("| true 2>/dev/full", "Broken pipe")],
)
def test_prints_of_a_program_itself_are_lost_and_its_status_is_kept(streams, reason):
    """Python itself would end with status 120, since it cannot flush the streams at the end."""
    command = f"({sys.executable} -c '{PROGRAM}' 7; echo status $? >&8) {streams}"
    shell = ["bash", "-c", f"exec 7>&1 8>&2; {command}"]
    done = subprocess.run(shell, capture_output=True, text=True, check=False)
    assert "status 0" in done.stderr
    assert reason in done.stdout


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_line_is_written_at_once(unbuffered):
    program = (
        "import os; from hvdtrain.settings.safety import output; output.guard_streams(); print('a', 'line', file={}); "
    )
    program += "os.write({}.fileno(), b'later')"
    for stream in ("sys.stdout", "sys.stderr"):
        words = [sys.executable, "-c", f"import sys; {program.format(stream, stream)}"]
        environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True, env=environment)
        expected = b"latera line\n" if (stream, unbuffered) == ("sys.stdout", "") else b"a line\nlater"
        assert done.stdout == expected  # Python itself keeps what goes into a pipe


@pytest.fixture(params=["hvdtrain", "hvdlaunch"])
def program(request, monkeypatch):
    """The name of a program, and what prints its messages."""
    logger = logging.getLogger(request.param)
    monkeypatch.setattr(logger, "handlers", [*logger.handlers])
    prints = exits.print_message if request.param == "hvdtrain" else lambda *words: launchs.say(": ".join(words))
    yield request.param, prints
    logger.setLevel(logging.INFO)


def test_notes_and_warnings_are_lines_and_a_level_silences_them(program, capsys):
    name, prints = program
    severities = ["note", "warning", "error"]
    for silenced, level in enumerate((logging.INFO, logging.WARNING, logging.CRITICAL)):
        logging.getLogger(name).setLevel(level)
        for severity in severities:
            prints(severity, "100 % of a")
        expected = "".join(f"{name}: {severity}: 100 % of a\n" for severity in severities[silenced:])
        assert capsys.readouterr().err == expected


@pytest.mark.parametrize("of_root", [True, False])
def test_a_handler_of_the_program_gets_notes_and_warnings_instead(program, of_root, capsys, monkeypatch):
    name, prints = program
    taken = []
    handler = Mock(level=0, handle=lambda record: taken.append((record.levelname, record.getMessage(), record.module)))
    monkeypatch.setattr(logging.root, "handlers", [handler] if of_root else [])
    if not of_root:
        logging.getLogger(name).addHandler(handler)
    for severity in ("note", "warning", "error"):
        prints(severity, "of a")
    assert taken == [("INFO", "of a", "test_output"), ("WARNING", "of a", "test_output")]
    assert capsys.readouterr().err == f"{name}: error: of a\n"
