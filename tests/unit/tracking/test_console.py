import io
import sys

import pytest

from hvdtrain.tracking.console import Console, progress_bar
from tests.terminal import Terminal, terminal_of


def test_a_terminal_shows_how_far_each_part_of_a_run_is(monkeypatch, capsys):
    terminal = terminal_of(monkeypatch)
    console = Console(is_shown=True)
    for what in ("epoch 3", "test"):
        for number in console.progress_bar(range(4), title=what, total=4):
            if number == 1:
                console.print("a line")
    next(iter(console.progress_bar(range(4), title="left", total=4)))
    console.close()
    console.print("another")
    shown = terminal.getvalue()
    assert "epoch 3:" in shown
    assert "| 0/4 [" in shown.partition("test:")[2]
    assert shown.endswith("\r")  # nothing of a bar is left
    assert capsys.readouterr().out == "a line\na line\nanother\n"


@pytest.mark.parametrize(("shown", "is_shown"), [(io.StringIO(), True), (Terminal(), False)])
def test_a_pipe_and_other_ranks_have_no_bar(monkeypatch, shown, is_shown):
    monkeypatch.setattr(sys, "stderr", shown)
    assert list(Console(is_shown=is_shown).progress_bar(range(4), title="test", total=4)) == [0, 1, 2, 3]
    assert list(progress_bar(range(2), is_shown=is_shown, title="reading texts", unit="row")) == [0, 1]
    assert shown.getvalue() == ""
