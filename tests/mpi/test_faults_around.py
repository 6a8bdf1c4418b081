"""Faults of what surrounds the ranks: their data, memory and disk, the launcher, and requests to end."""

import contextlib
import json
import os
import re
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from hvdtrain.checkpoint import files as checkpoint
from tests.mpi.conftest import TIMEOUT_S, left_in, rank_pids, wait_until
from tests.mpi.launched import argv, finished, started
from tests.mpi.test_faults import ONE_EPOCH, TRAIN, clean, newest, run_folder, weights, words_of
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

READS_S = 2  # for --hang-timeout-s; reading may take ten times as long


@pytest.fixture
def on_images(tmp_path):
    """Words of a training on tmp_path/d, 16 images of which are for training: 2 steps per epoch, endlessly."""
    noise = np.random.default_rng(0)
    for part in ("train", "val"):
        for label in ("a", "b"):
            folder = tmp_path / "d" / part / label
            folder.mkdir(parents=True)
            for number in range(8):
                Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    words = [*TRAIN, "--data", "imagefolder", "--data-dir", "d", "--batch-size-per-rank", "4"]
    return [*words, "--epochs", "100000"]


def doing(folder):
    """What both ranks do, as their lines say: step 7 reading step 7 waiting."""
    return " ".join((run_folder(folder) / "ranks" / f"rank-{rank}.at").read_text().strip() for rank in (0, 1))


@pytest.mark.slow
def test_reading_may_take_longer_than_a_step_but_not_for_ever(tmp_path, on_images):
    """The ranks read by themselves, from a disk that stalls twice."""
    image, waits, beside = tmp_path / "d" / "train" / "b" / "3.png", tmp_path / "waits", tmp_path / "d" / "beside"
    whole = image.read_bytes()

    def stall():
        os.mkfifo(beside)  # whoever opens it waits for a writer
        os.link(beside, waits)
        beside.replace(image)

    begun = {}  # when each line was seen first

    def stood_still():
        now, line = time.monotonic(), doing(tmp_path)
        return "reading" in line and now - begun.setdefault(line, now) > 2 * READS_S

    words = [*on_images, "--workers", "0", "--hang-timeout-s", str(READS_S)]
    with started(tmp_path, argv(program=words)) as job:
        wait_until(lambda: step_of(tmp_path) >= 8, TIMEOUT_S)
        stall()
        wait_until(stood_still, TIMEOUT_S)
        before = step_of(tmp_path)
        beside.write_bytes(whole)
        beside.replace(image)
        os.close(os.open(waits, os.O_WRONLY | os.O_NONBLOCK))
        wait_until(lambda: step_of(tmp_path) > before + 10, 60)
        waits.unlink()
        stall()
        assert job.wait(60) == 1
        wait_until(lambda: not left_in(tmp_path), 5)
    hung = rf"hung at step \d+ while reading: no progress for 0:00:{10 * READS_S};"
    found = re.search(rf"^hvdlaunch: error: rank ([01]) on localhost {hung}", said(tmp_path), re.M)
    assert found, said(tmp_path)
    assert words_of(tmp_path, found[1]).startswith(f"Timeout (0:00:{10 * READS_S})!")
    assert doing(tmp_path).split()[2::3] == (["reading", "waiting"] if found[1] == "0" else ["waiting", "reading"])


@pytest.mark.slow
def test_a_loader_worker_that_is_killed(tmp_path, on_images):
    with started(tmp_path, argv("--restarts", "1", program=on_images)) as job:
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


# --- disk


@contextlib.contextmanager
def read_only(folder):
    """An empty file system over the folder, on which nothing can be written; files that are open stay."""
    mount = ["mount", "-t", "tmpfs", "-o", "ro,size=64m", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.mark.slow
def test_a_run_folder_that_becomes_read_only(tmp_path, monkeypatch):
    """The run trains to its end; asked to leave it says that nothing could be saved, and its status is SIGTERM's."""
    with started(tmp_path, argv(program=ENDLESS)) as job:
        wait_until(lambda: step_of(tmp_path) >= 7, TIMEOUT_S)
        kept = wait_until(lambda: saved(tmp_path), 60)
        with read_only(run_folder(tmp_path)):
            wait_until(lambda: "warning: checkpoint write failed: " in said(tmp_path), 60)
            os.kill(job.pid, signal.SIGTERM)
            assert job.wait(60) == 143, said(tmp_path)
            wait_until(lambda: not left_in(tmp_path), 5)
    assert "hvdtrain: error: stop requested, but the checkpoint could not be written" in said(tmp_path)
    assert newest(tmp_path) >= kept
