"""Bad input, which is told in one line."""

import pytest

from hvdtrain.safety.exits import BadInput


def refused(attempt):
    """The one line that `attempt` is refused with; the error goes, and with it what its frames hold."""
    try:
        attempt()
    except BadInput as error:
        line = str(error)
    else:
        pytest.fail("was not refused")
    assert "\n" not in line
    return line
