"""Bad input, which is told in one line."""

import pytest

from hvdtrain.safety.exits import BadInput


def refused(attempt):
    """The one line that `attempt` is refused with."""
    with pytest.raises(BadInput) as error:
        attempt()
    assert "\n" not in str(error.value)
    return str(error.value)
