import pytest

from hvdtrain.settings.launched import VARIABLE, fact
from tests.refusals import refused


@pytest.mark.parametrize(("facts", "restart"), [({}, 0), ({VARIABLE: "{}"}, 0), ({VARIABLE: '{"restart": 3}'}, 3)])
def test_the_launcher_says_what_it_knows(facts, restart):
    assert fact(facts, "restart", 0) == restart


@pytest.mark.parametrize("text", ["", "1", "[" * 100_000, '{"restart": "3"}', '{"restart": true}'])
def test_a_variable_that_hvdlaunch_has_not_set_is_refused(text):
    line = refused(lambda: fact({VARIABLE: text}, "restart", 0))
    assert line == "HVDLAUNCH_RANK: not the JSON that hvdlaunch sets. Unset it."
