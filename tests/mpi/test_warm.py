"""Real runs that go on from keepers: ranks that start by themselves first, and with what a keeper has imported then."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.mpi.conftest import left_in, wait_until
from tests.mpi.forks import BY_ITSELF
from tests.mpi.interrupted import WHOLE
from tests.mpi.launched import argv, finished, started

WORDS = [sys.executable, "-m", "hvdtrain.effnet", *WHOLE, "--epochs", "1", "--deterministic", "--run", "r"]
CALLS = ("cuInit", "cuDriverGetVersion", "cuDeviceGetCount", "cuGetProcAddress", "cuGetProcAddress_v2")
STUB = "#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n" + "".join(
    f'int {call}(void) {{ FILE *log = fopen(getenv("CUDA_LOG"), "a"); fprintf(log, "%d {call}\\n", getpid()); '
    "fclose(log); return 100; }\n"  # CUDA_ERROR_NO_DEVICE
    for call in CALLS
)


def facts(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("runs/effnet/r/ranks/rank-?.json"))]


def keeper_of(pid: int) -> psutil.Process | None:
    """The keeper of hvdlaunch, once it listens."""
    for child in psutil.Process(pid).children():
        words = child.cmdline()
        if len(words) > 3 and words[1].endswith("keeper.py") and words[3] in Path("/proc/net/unix").read_text():
            return child
    return None


@pytest.mark.slow
def test_after_a_kill_ranks_are_forks_of_a_keeper_with_the_same_bits(tmp_path):
    whole = tmp_path / "whole"
    whole.mkdir()
    assert finished(whole, argv(program=WORDS)).returncode == 0
    (tmp_path / "cuda.c").write_text(STUB)
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", "libcuda.so.1", "cuda.c"], cwd=tmp_path, check=True)
    log = tmp_path / "calls"
    env = {**BY_ITSELF, "LD_LIBRARY_PATH": str(tmp_path), "CUDA_LOG": str(log)}
    with started(tmp_path, argv("--restarts", "3", "-x", "CUDA_LOG", program=WORDS), **env) as job:
        wait_until(lambda: list(tmp_path.glob("runs/effnet/r/checkpoints/step-*")), 60, tmp_path / "out")
        pids = [rank["pid"] for rank in facts(tmp_path)]
        for pid in pids:
            os.kill(pid, signal.SIGSTOP)
        keeper = wait_until(lambda: keeper_of(job.pid), 60)
        os.kill(pids[1], signal.SIGKILL)
        os.kill(pids[0], signal.SIGCONT)
        wait_until(lambda: [child.cmdline()[1:] for child in keeper.children()] == [WORDS[1:]] * 2, 30)
        forks = {child.pid for child in keeper.children()}
        assert job.wait(60) == 0, (tmp_path / "out").read_text()
    wait_until(lambda: not left_in(tmp_path), 5)
    assert not keeper.is_running()
    assert {rank["pid"] for rank in facts(tmp_path)} == forks
    weights = {rank["weights_sha256"] for folder in (whole, tmp_path) for rank in facts(folder)}
    assert len(weights) == 1
    called = {int(line.split()[0]) for line in log.read_text().splitlines()} if log.exists() else set()
    assert keeper.pid not in called
