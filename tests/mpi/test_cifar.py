"""The command for CIFAR-10 on eight ranks: word by word, and as a program that knows other files' sums."""

import shlex
import subprocess

import pytest

from tests.mpi.conftest import environment

COMMAND = "horovodrun -np 8 python -m hvdtrain.effnet"
pytestmark = pytest.mark.slow


def started(folder, command, **env):
    return subprocess.run(
        shlex.split(command),
        cwd=folder,
        env={**environment(folder), "MPIEXEC_TIMEOUT": "240", **env},
        capture_output=True,
        text=True,
        timeout=270,
        check=False,
    )


def test_without_cifar10_and_without_a_network_the_line_names_a_command(tmp_path):
    nobody = "http://127.0.0.1:9"
    done = started(tmp_path, COMMAND, http_proxy=nobody, https_proxy=nobody)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "hvdtrain: " in line]
    assert "CIFAR-10 is missing and cannot be downloaded" in line
    assert "python -m hvdtrain.effnet --data digits" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
