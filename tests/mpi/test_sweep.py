"""hvdlaunch sweep with the real mpirun: a small study of real training, and studies of which a part fails."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mpi.conftest import EFFNET, PROGRAMS, left_in, wait_until
from tests.mpi.launched import finished, started

pytestmark = pytest.mark.slow

ANSWERS = [sys.executable, str(PROGRAMS / "leave_result.py")]
TRAIN = ["--data", "digits", "--model", "efficientnet_tiny", "--epochs", "1", "--ema-epochs", "0"]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "launch", "sweep", "--name", "study", "--gpus", "none", *words]


def sweep(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return finished(folder, command(*words))


def rows(folder: Path) -> dict[tuple[int, int], dict[str, Any]]:
    known = json.loads((folder / "sweeps/study/sweep.json").read_text())
    return {(row["np"], row["seed"]): row for row in known["runs"]}


def test_a_study_of_real_training(tmp_path: Path) -> None:
    done = sweep(tmp_path, "-np", "1,2", "--", sys.executable, *EFFNET, *TRAIN, "--batch-size-per-rank", "64")
    assert done.returncode == 0, done.stdout + done.stderr
    for np in (1, 2):
        row = rows(tmp_path)[np, 0]
        assert (row["status"], row["why"]) == (0, None)
        assert row["run_folder"] == str(tmp_path / f"runs/effnet/study-np{np}-seed0")
        result = json.loads(Path(row["run_folder"], "result.json").read_text())
        assert (result["np"], result["global_batch"]) == (np, 64 * np)
    assert (tmp_path / "sweeps/study/table.md").read_text().strip() in done.stdout


def test_seeds_reach_the_ranks_a_bad_size_is_a_row_and_a_repeat_runs_it_alone(tmp_path: Path) -> None:
    words = ["-np", "2,3", "--seeds", "2", "--", *ANSWERS, "2", "0"]
    done = sweep(tmp_path, *words)
    assert done.returncode == 1
    why = "rank 1 on localhost ended with status 3"
    assert {at: (row["status"], row["why"]) for at, row in rows(tmp_path).items()} == {
        (2, 0): (3, why),
        (2, 1): (3, why),
        (3, 0): (0, None),
        (3, 1): (0, None),
    }
    for (_, seed), row in rows(tmp_path).items():
        assert json.loads(Path(row["run_folder"], "config.json").read_text()) == {"seed": seed}
    again = sweep(tmp_path, *words)
    assert again.returncode == 1
    assert again.stderr.count("finished before") == 2
    assert again.stderr.count(f"hvdlaunch: error: {why}") == 2


def test_a_signal_ends_the_study_and_its_ranks(tmp_path: Path) -> None:
    words = command("-np", "1,2,3", "--", *ANSWERS, "0", "2")
    with started(tmp_path, words) as running:
        wait_until((tmp_path / "runs/study-np2-seed0/config.json").exists, 60)
        os.kill(running.pid, signal.SIGINT)
        assert running.wait(30) == 130
    assert {at: row["status"] for at, row in rows(tmp_path).items()} == {(1, 0): 0, (2, 0): 130}
    assert left_in(tmp_path) == []
