"""kill -9 while checkpoints are being written."""

import pytest

from tests.unit.checkpoint.kill_while_saving import outcome_of


@pytest.mark.parametrize(
    ("kills", "times"),
    [(15, 1), pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(100, 2, marks=pytest.mark.slow)],
)
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path, kills, times):
    """The newest is whole and never older than the last committed one, also if a step is saved again."""
    outcome = outcome_of(tmp_path / "checkpoints", kills, times)
    assert (outcome["older"], outcome["passed over"]) == (0, 0)
    assert outcome["in the middle"] > kills / 5  # of writing: the process left a half-written folder
    assert outcome["committed"] > kills / 5
