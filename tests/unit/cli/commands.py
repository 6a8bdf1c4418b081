"""hvdlaunch with some words, inside this process."""

import pytest

from launch.cli import main as cli


def ended(capsys, *words):
    """Status, standard output and standard error of one command."""
    with pytest.raises(SystemExit) as left:
        cli.main(words)
    out, err = capsys.readouterr()
    return left.value.code, out, err


def output(capsys, *words):
    status, out, err = ended(capsys, *words)
    assert (status, err) == (0, "")
    return out


def refusal(capsys, *words):
    """The one line of a command that is refused, without its first word."""
    status, out, err = ended(capsys, *words)
    assert (status, out) == (2, "")
    assert err.startswith("hvdlaunch: error: ")
    assert err.endswith("\n")
    assert err.count("\n") == 1
    return err.removeprefix("hvdlaunch: error: ").rstrip()
