"""Bad input, which is reported in one line."""

import re
from collections.abc import Callable

import pytest

from hvdtrain.settings.safety.exits import BadInput, EndOfRun


def refused(attempt: Callable[[], object], begins: str = "") -> str:
    """The one line that `attempt` is refused with; the error goes, and with it what its frames hold."""
    try:
        attempt()
    except BadInput as error:
        line = str(error)
    else:
        pytest.fail("was not refused")
    assert "\n" not in line
    assert line.startswith(begins)
    return line


def ended(attempt: Callable[[], object], match: str | None = None) -> tuple[int, str]:
    """Status and reason of the agreed end that `attempt` comes to, with a message that matches."""
    with pytest.raises(EndOfRun, match=match) as end:
        attempt()
    return end.value.status, end.value.reason


def require_facts(line, facts):
    """Fail unless a line has these facts in this order, as in '--tensor 4 ... 2 heads ... --tensor 2'.

    The facts are an option with its value, a file with its line, a number, a remedy; the words between may change.
    """
    position = 0
    for fact in facts.split(" ... "):
        position = line.find(fact, position)
        assert position >= 0, f"{fact!r} is missing, or too early, in: {line}"
        position += len(fact)


def options_refused_together(attempt):
    """The two options, with their values, that a refusal names as not working together."""
    line = refused(attempt)
    pair = re.fullmatch(r"(?:.*; but )?(--.+) does not work with (--.+?): .+\. Use only one\.", line)
    assert pair is not None, line
    return {pair[1], pair[2]}
