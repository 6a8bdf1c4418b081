"""The README's command for CIFAR-10 on eight ranks, by a program that knows the sums of other files."""

import json

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.mpi.conftest import EVERY_OPTION, end_well, program_of
from tests.unit.tasks.vision.data_sets import Cifar

# With the sums of the files that the test has written.
SUMS = """\
import runpy
from torchvision.datasets import CIFAR10

for name, sums in {sums}.items():
    setattr(CIFAR10, name, sums)
runpy.run_module("hvdtrain.effnet", run_name="__main__", alter_sys=True)
"""


@pytest.mark.slow
@pytest.mark.long  # eight ranks on two cores; four train in make test
def test_eight_ranks_train_on_cifar10(tmp_path):
    written = Cifar(train=8 * 16, test=64)
    written.write(tmp_path / "cifar")
    program = program_of(tmp_path, EVERY_OPTION + SUMS.format(sums=written.sums))
    words = ["--data-dir", "cifar", "--epochs", "1", "--run", "r"]
    small = ["--stem-stride", "2", "--batch-size-per-rank", "16"]  # a fraction of the time and memory
    said = end_well(tmp_path, "horovodrun", 8, [program, *words, *small], MPIEXEC_TIMEOUT="240")
    folder = tmp_path / "runs" / "effnet" / "r"
    result = json.loads((folder / "result.json").read_text())
    assert (result["np"], result["global_batch"], result["steps"]) == (8, 128, 1)
    assert (result["data"], result["model"]) == ("cifar10", "efficientnet_b0")
    assert result["exit_reason"] == "finished"
    assert 0 < result["eval_accuracy"] < 1
    assert f"test accuracy {result['eval_accuracy']:.2%}" in said
    curves = EventAccumulator(str(folder)).Reload()
    assert [point.value for point in curves.Scalars("eval/accuracy")] == [pytest.approx(result["eval_accuracy"])]
    ranks = [json.loads(file.read_text()) for file in folder.glob("ranks/rank-*.json")]
    assert len({one["pid"] for one in ranks}) == 8
    assert len({one["weights_sha256"] for one in ranks}) == 1
