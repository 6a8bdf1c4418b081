"""kill -9 while checkpoints are being written."""

import json
import subprocess
import sys

import pytest


@pytest.mark.parametrize("times", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path, times):
    """The newest is whole and never older than the last committed one, also if a step is saved again."""
    arguments = ["-m", "tests.unit.checkpoint.kill_while_saving", tmp_path / "checkpoints", "100", str(times)]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert (outcome["older"], outcome["passed over"]) == (0, 0)
    assert outcome["in the middle"] > 20  # of writing: the process left a half-written folder
    assert outcome["committed"] > 20
