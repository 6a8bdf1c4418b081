"""Real runs that go on from the state in memory: no checkpoint is on disk when a rank is killed."""

import contextlib
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mpi.conftest import left_in, long, wait_until
from tests.mpi.interrupted import TINY
from tests.mpi.launched import argv, finished, started

WORDS = [sys.executable, "-m", "hvdtrain.effnet", *TINY, "--batch-size-per-rank", "8", "--epochs", "1"]
WORDS += ["--deterministic", "--run", "r", "--checkpoint-every", "0s"]
ENDLESS = [*WORDS, "--epochs", "1000"]


def weights(folder: Path) -> set[str]:
    files = folder.glob("runs/effnet/r/ranks/rank-?.json")
    return {json.loads(file.read_text())["weights_sha256"] for file in files}


def memory_of(pid: int) -> Path | None:
    """hvdlaunch's file, once it has a state."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # it has been closed
            if str(link.readlink()).startswith("/memfd:hvdlaunch-") and link.stat().st_size:
                return link
    return None


def open_files() -> Iterator[Path]:
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):  # it has been closed, or is of another user
            yield link.readlink()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    assert finished(folder, argv("--restarts", "1", program=WORDS)).returncode == 0
    return weights(folder)


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, long(1)])
def test_after_a_kill_the_state_in_memory_goes_on_with_the_same_bits(tmp_path, whole, rank):
    done = finished(tmp_path, argv("--restarts", "1", program=WORDS), HVDTRAIN_FAULT=f"kill@rank{rank}:step40")
    assert done.returncode == 0, done.stderr
    assert "from the state in memory" in done.stderr
    (step,) = re.findall(r"resumed from \S+/step-(\d+)", done.stdout)
    assert 0 < int(step) < 40
    assert weights(tmp_path) == whole
    assert len(whole) == 1


@pytest.mark.slow
def test_a_killed_hvdlaunch_leaves_no_memory(tmp_path):
    with started(tmp_path, argv("--restarts", "1", program=ENDLESS)) as job:
        name = wait_until(lambda: memory_of(job.pid), 60, tmp_path / "out").readlink()
        os.kill(job.pid, signal.SIGKILL)
        wait_until(lambda: not left_in(tmp_path), 20)
    assert name not in open_files()
