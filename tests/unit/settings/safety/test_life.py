"""What a person sees of a run that says nothing, on a terminal of the kernel and on none."""

import os
import subprocess
import sys
import time

import pytest

from tests.terminal import Pty

PROGRAM = """
import sys, time
from hvdtrain.settings.safety import exits, life, output
life.SHOWN_AFTER_S, life.EVERY_S, life.SAID_AFTER_S = 0.0, 0.01, 0.3

def main():
    life.begin()
    life.doing("loading torch")
    time.sleep(1)
    print("a line")
    print("and a warning", file=sys.stderr)
    print("a question? ", end="", flush=True)
    time.sleep(0.2)
    print("answered")
    time.sleep(0.2)
    raise exits.BadInput("the end")

exits.run(main)
"""
PRINTED = ["a line", "and a warning", "a question? answered", "hvdtrain: error: the end"]


def start(tmp_path, **streams):
    words = [sys.executable, "-c", PROGRAM]
    return subprocess.Popen(words, env={**os.environ, "TERM": "xterm"}, cwd=tmp_path, **streams)


def test_a_terminal_shows_it_below_the_lines_and_nothing_at_the_end(tmp_path):
    pty, seen = Pty(columns=60), set()
    with start(tmp_path, stdout=pty.end, stderr=pty.end) as process:
        while process.poll() is None:
            seen.add(tuple(pty.lines()))
            time.sleep(0.01)
    assert process.returncode == 2
    assert pty.settled() == [*PRINTED, ""]
    assert ("loading torch, 0 s",) in seen
    assert any(lines[:2] == tuple(PRINTED[:2]) and lines[-1] == "a question? " for lines in seen)


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_pipe_gets_a_line_after_a_silence(tmp_path, is_watched):
    """The launcher may have a terminal: then a person waits, who learns it sooner."""
    pty = Pty()
    (tmp_path / "program.py").write_text(PROGRAM.replace("0.3", "60") if is_watched else PROGRAM)
    launch = "import subprocess, sys; subprocess.call([sys.executable, 'program.py'], stderr=open('errors', 'w'))"
    words, nothing = [sys.executable, "-c", launch], subprocess.DEVNULL
    subprocess.run(words, stdout=nothing, stderr=pty.end if is_watched else nothing, cwd=tmp_path, check=True)
    said = (tmp_path / "errors").read_text().splitlines()
    notes = [line for line in said if line.startswith("hvdtrain: note: loading torch, ")]
    assert len(notes) == 1 if is_watched else len(notes) >= 2
    assert [line for line in said if line not in notes] == PRINTED[1::2]
