"""What only a CUDA device can show; skipped where there is none."""

import json
import subprocess
import sys

import pytest
import torch

from hvdtrain.train.feed import prefetched

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_horovod_has_nccl_operations():
    done = subprocess.run(["horovodrun", "--check-build"], capture_output=True, text=True, check=True)
    assert "[X] NCCL" in done.stdout


def test_versions_are_known_before_cuda_starts():
    program = (
        "import json, torch; from hvdtrain.ranks.libraries import library_versions; found = library_versions();"
        "print(json.dumps([found, torch.cuda.is_initialized()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    found, started = json.loads(done.stdout)
    assert not started
    assert all(found[name][0].isdigit() for name in ("nccl", "cuda", "nvidia_driver"))
    assert found["mpi"] is None


def test_prefetched_batches_are_the_batches():
    device = torch.device("cuda", 0)
    batches = [
        {"images": torch.full((64, 3, 32, 32), number, dtype=torch.uint8), "labels": torch.arange(64)}
        for number in range(20)
    ]
    arrived = [{name: tensor.cpu() for name, tensor in batch.items()} for batch in prefetched(batches, device)]
    assert len(arrived) == len(batches)
    for batch, expected in zip(arrived, batches, strict=True):
        assert batch.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in batch.items())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_run_on_a_gpu_learns(tmp_path, precision):
    words = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64", "--epochs", "10"]
    subprocess.run(
        [
            "horovodrun",
            "-np",
            "1",
            sys.executable,
            "-m",
            "hvdtrain.effnet",
            *words,
            "--precision",
            precision,
            "--run",
            "r",
        ],
        cwd=tmp_path,
        check=True,
    )
    result = json.loads((tmp_path / "runs" / "effnet" / "r" / "result.json").read_text())
    assert result["eval_accuracy"] > 0.9
    assert (
        json.loads((tmp_path / "runs" / "effnet" / "r" / "placement.json").read_text())["ranks"][0]["device"]
        == "cuda:0"
    )


def test_two_ranks_on_one_gpu_are_refused(tmp_path):
    if torch.cuda.device_count() != 1:
        pytest.skip("needs a machine with exactly one GPU")
    words = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64"]
    done = subprocess.run(
        ["horovodrun", "-np", "2", sys.executable, "-m", "hvdtrain.effnet", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "both given GPU" in done.stdout + done.stderr
