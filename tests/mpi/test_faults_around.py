"""Faults of what surrounds the ranks: their data, memory and disk, the launcher, and requests to end."""

import contextlib
import json
import os
import re
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi.conftest import TIMEOUT_S, folder_of_images, left_in, rank_pids, wait_until
from tests.mpi.launched import argv, finished, started
from tests.mpi.test_faults import ONE_EPOCH, TRAIN, clean, newest, run_folder, weights
from tests.refusals import require_facts

__all__ = ["clean"]  # a fixture
ENDLESS = [*TRAIN, "--epochs", "100000"]
CGROUPS = Path("/sys/fs/cgroup")
MIB = 2**20


def step_of(folder, rank=0):
    """The step that a rank is in, 0 before the first."""
    with contextlib.suppress(OSError, ValueError):
        return int((run_folder(folder) / "ranks" / f"rank-{rank}.at").read_text().split()[1])
    return 0


def saved(folder):
    """The newest checkpoint's step."""
    found, _ = checkpoint.find_newest(run_folder(folder) / "checkpoints")
    return found.step if found else 0


def said(folder):
    return (folder / "out").read_text()


def stopped(folder, rank):
    """The rank's process, once it is stopped."""
    for pid in rank_pids(run_folder(folder))[rank : rank + 1]:
        with contextlib.suppress(psutil.NoSuchProcess):
            if (process := psutil.Process(pid)).status() == psutil.STATUS_STOPPED:
                return process
    return None


# --- asked to end


def test_sigterm_to_hvdlaunch_saves_at_once_and_no_step_is_lost(tmp_path, clean, monkeypatch):
    """It comes while rank 0 stands still in a step."""
    monkeypatch.setenv("HVDTRAIN_FAULT", "stop@rank0:step7")
    program = [*TRAIN, *ONE_EPOCH]
    with started(tmp_path, argv(program=program)) as job:
        rank = wait_until(lambda: stopped(tmp_path, 0), TIMEOUT_S)
        os.kill(job.pid, signal.SIGTERM)
        with pytest.raises(subprocess.TimeoutExpired):
            job.wait(2.5)
        rank.resume()
        assert job.wait(60) == 0, said(tmp_path)
    wait_until(lambda: not left_in(tmp_path), 5)
    left_at = json.loads((run_folder(tmp_path) / "result.json").read_text())["steps"]
    assert newest(tmp_path) == left_at
    require_facts(said(tmp_path).splitlines()[-1], f"hvdtrain: note: saved at step {left_at} ... --run r")
    done = finished(tmp_path, argv(program=program), HVDTRAIN_FAULT="")
    assert done.returncode == 0, done.stderr
    assert f"resumed from runs/effnet/r/checkpoints/step-{left_at:09d}" in done.stdout + done.stderr
    assert weights(tmp_path) == clean


# --- data


@pytest.mark.slow
def test_a_loader_worker_that_is_killed(tmp_path):
    folder_of_images(tmp_path / "d", 8, ("train", "val"))
    words = ["--data", "imagefolder", "--data-dir", "d", "--batch-size-per-rank", "4"]
    with started(tmp_path, argv("--restarts", "1", program=[*ENDLESS, *words])) as job:
        wait_until(lambda: step_of(tmp_path) >= 8, TIMEOUT_S)
        rank = psutil.Process(rank_pids(run_folder(tmp_path))[1])
        worker = next(one for one in rank.children() if "spawn_main" in " ".join(one.cmdline()))
        worker.kill()
        again = "hvdlaunch: warning: restart 1 of 1 after: rank 1 on localhost ended with status 1 at step "
        wait_until(lambda: again in said(tmp_path), 60)
        wait_until(lambda: "resumed from" in said(tmp_path), 60)
        resumed = int(re.search(r"resumed from .*step-(\d+)", said(tmp_path))[1])
        wait_until(lambda: saved(tmp_path) > resumed, 60)
        os.kill(job.pid, signal.SIGTERM)
        assert job.wait(60) == 0, said(tmp_path)
    (line,) = (line for line in said(tmp_path).splitlines() if line.startswith(again))
    named = rf": DataLoader worker \(pid(\(s\))? {worker.pid}\) (is killed by signal: Killed\.|exited unexpectedly)"
    assert re.search(named, line), "torch says one or the other, whichever of its two ways notices first"


# --- memory


@pytest.fixture
def little_memory():
    """A function that lets a process have 256 MiB more."""
    v1, v2 = CGROUPS / "memory", CGROUPS
    root, limit = (v1, "memory.limit_in_bytes") if v1.is_dir() else (v2, "memory.max")
    group = root / f"hvdtrain-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / limit).write_text(str(256 * MIB))
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"no memory limit can be set in {root}: {error.strerror}")
    for swap in ("memory.swap.max", "memory.memsw.limit_in_bytes"):
        with contextlib.suppress(OSError):
            (group / swap).write_text("0" if "max" in swap else str(256 * MIB))
    yield lambda process: (group / "cgroup.procs").write_text(str(process.pid))
    group.rmdir()


@pytest.mark.slow
def test_a_rank_that_is_killed_by_its_memory_limit(tmp_path, monkeypatch, little_memory):
    monkeypatch.setenv("HVDTRAIN_FAULT", "stop@rank1:step7,oom@rank1:step8")
    with started(tmp_path, argv(program=TRAIN)) as job:
        rank = wait_until(lambda: stopped(tmp_path, 1), TIMEOUT_S)
        little_memory(rank)
        rank.resume()
        assert job.wait(60) == 137, said(tmp_path)
        wait_until(lambda: not left_in(tmp_path), 5)
    line = "hvdlaunch: error: rank 1 on localhost died of signal 9 (Killed), perhaps out of memory, at step 8"
    assert line in said(tmp_path).splitlines()
    assert newest(tmp_path) == 5
