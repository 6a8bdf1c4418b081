"""The command for CIFAR-10 on eight ranks: word by word, and as a program that knows other files' sums."""

import json
import shlex
import subprocess

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.mpi.conftest import EVERY_OPTION, environment, program_of
from tests.unit.vision.data_sets import Cifar

COMMAND = "horovodrun -np 8 python -m hvdtrain.effnet"
# With the sums of the files that the test has written.
SUMS = """\
import runpy
from torchvision.datasets import CIFAR10

for name, sums in {sums}.items():
    setattr(CIFAR10, name, sums)
runpy.run_module("hvdtrain.effnet", run_name="__main__", alter_sys=True)
"""

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


def test_eight_ranks_train_on_cifar10(tmp_path):
    written = Cifar(train=8 * 16, test=64)
    written.write(tmp_path / "cifar")
    program = program_of(tmp_path, EVERY_OPTION + SUMS.format(sums=written.sums))
    command = COMMAND.replace("-m hvdtrain.effnet", program)
    small = "--stem-stride 2 --batch-size-per-rank 16"  # a fraction of the time and memory
    done = started(tmp_path, f"{command} --data-dir cifar --epochs 1 {small}")
    assert done.returncode == 0, done.stdout + done.stderr
    [folder] = (tmp_path / "runs" / "effnet").iterdir()
    result = json.loads((folder / "result.json").read_text())
    assert (result["np"], result["global_batch"], result["steps"]) == (8, 128, 1)
    assert (result["data"], result["model"]) == ("cifar10", "efficientnet_b0")
    assert result["exit_reason"] == "finished"
    assert 0 < result["eval_accuracy"] < 1
    assert f"test accuracy {result['eval_accuracy']:.2%}" in done.stdout
    curves = EventAccumulator(str(folder)).Reload()
    assert [point.value for point in curves.Scalars("eval/accuracy")] == [pytest.approx(result["eval_accuracy"])]


def test_without_cifar10_and_without_a_network_the_line_names_a_command(tmp_path):
    nobody = "http://127.0.0.1:9"
    done = started(tmp_path, COMMAND, http_proxy=nobody, https_proxy=nobody)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if "hvdtrain: " in line]
    assert "CIFAR-10 is missing and cannot be downloaded" in line
    assert "python -m hvdtrain.effnet --data digits" in line
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()
