"""kill -9 while checkpoints are being written."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("kills", "times"),
    [(25, 1), pytest.param(100, 1, marks=pytest.mark.slow), pytest.param(100, 2, marks=pytest.mark.slow)],
)
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path, kills, times):
    """The newest is whole and never older than the last committed one, also if a step is saved again."""
    arguments = ["-m", "tests.unit.checkpoint.kill_while_saving", tmp_path / "checkpoints", str(kills), str(times)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["older"], outcome["passed over"]) == (0, 0)
    assert outcome["in the middle"] > kills / 5  # of writing: the process left a half-written folder
    assert outcome["committed"] > kills / 5
