"""A tenth of the soak: whatever strikes, a run with --restarts ends with the bits of an undisturbed one."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "bench/run.py"


@pytest.mark.slow  # four minutes
@pytest.mark.timeout(1800)
def test_a_hundred_faults_leave_nothing_but_the_weights_of_an_undisturbed_run(tmp_path):
    words = [sys.executable, str(BENCH), "soak", "--faults", "100", "--per-run", "100", "--seed", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
