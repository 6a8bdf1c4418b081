"""The disk that holds the runs fills up while they train."""

import json
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.mpi.conftest import EFFNET, QUICK

KIB = 1024


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 96 KiB in runs/: room for the beginning of a run."""
    folder = tmp_path / "runs"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={96 * KIB}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_full_log_disk_does_not_stop_the_training(run, small_disk, ranks):
    words = [*QUICK[:-1], "12", "--report-every-steps", "1", "--run", "r"]
    done = run("mpirun", ranks, [*EFFNET, *words])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished: test accuracy" in done.stdout
    warnings = [line for line in done.stderr.splitlines() if "cannot be written (No space left on device)" in line]
    assert len(warnings) <= ranks, done.stderr  # each rank tells it once
    assert warnings
    folder = small_disk / "effnet" / "r"
    result = json.loads((folder / "result.json").read_text())
    assert (result["exit_reason"], result["epochs"]) == ("finished", 12)
    assert result["log_write_failures"] > 0
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "epoch" not in line] == list(range(1, lines[-1]["step"] + 1))
    assert 0 < lines[-1]["step"] < result["steps"]
    assert EventAccumulator(str(folder)).Reload().Scalars("train/loss")[-1].step > 0
