"""What only a CUDA device can show; skipped where there is none."""

import json
import os
import signal
import subprocess
import sys

import pytest
import torch

from hvdtrain.loop.feed.feed import prefetched
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.tasks.vision import models
from tests.steps import step_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def test_horovod_has_nccl_operations():
    done = subprocess.run(["horovodrun", "--check-build"], capture_output=True, text=True, check=True)
    assert "[X] NCCL" in done.stdout


def test_versions_are_known_before_cuda_starts():
    program = (
        "import json, sys; from hvdtrain.ranks.libraries import library_versions, sees_gpus; seen = sees_gpus();"
        "assert 'torch' not in sys.modules; import torch; found = library_versions();"
        "print(json.dumps([seen, found, torch.cuda.is_initialized()]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    seen, found, started = json.loads(done.stdout)
    assert seen
    assert not started
    assert all(found[name][0].isdigit() for name in ("nccl", "cuda", "nvidia_driver"))
    assert found["mpi"] is None


LONG = 200_000_000  # cycles: some 100 ms, in which the host gives all that follows to the device
BYTES = 2**24  # of a batch; the allocator keeps blocks of this size whole, and gives them out again for just this size
BATCHES = 6
CUDA = torch.device("cuda", 0)


def stream_with_memory():
    """A stream for which three blocks of BYTES bytes are kept, all 255: as many as are needed at a time."""
    stream = torch.cuda.Stream(CUDA)
    with torch.cuda.stream(stream):
        blocks = [torch.full((BYTES,), 255, dtype=torch.uint8, device=CUDA) for _ in range(3)]
    torch.cuda.synchronize()
    del blocks
    return stream


def pinned():
    """Batch n is all n. Made before anything sleeps, since to pin memory may wait for the device."""
    return [{"images": torch.full((BYTES,), number, dtype=torch.uint8).pin_memory()} for number in range(BATCHES)]


def looked_at():
    """Where the batches are copied to by the stream that uses them."""
    found = torch.full((BATCHES, BYTES), 254, dtype=torch.uint8, device=CUDA)
    torch.cuda.synchronize()
    return found


def values(found):
    """What each batch held when the device looked at it."""
    torch.cuda.synchronize()
    return [batch.unique().tolist() for batch in found]


def test_a_prefetched_batch_is_not_used_before_it_has_arrived():
    """Each copy is late on its stream: who does not wait for that stream sees 255, which the memory held before."""
    stream, batches, found = stream_with_memory(), pinned(), looked_at()

    def late():
        for batch in batches:
            with torch.cuda.stream(stream):
                torch.cuda._sleep(LONG)
            yield batch

    for place, batch in enumerate(prefetched(late(), CUDA, stream)):
        found[place].copy_(batch["images"])
    assert values(found) == [[number] for number in range(BATCHES)]


def test_a_prefetched_batch_stays_until_the_work_on_it_is_done():
    """The device looks late at each batch: memory that was given away when the host was done holds the third after."""
    stream, batches, found = stream_with_memory(), pinned(), looked_at()
    for place, batch in enumerate(prefetched(batches, CUDA, stream)):
        torch.cuda._sleep(LONG)
        found[place].copy_(batch["images"])
    assert values(found) == [[number] for number in range(BATCHES)]


@pytest.mark.parametrize("precision", ["tf32", "fp16"])
def test_a_run_on_a_gpu_learns(tmp_path, precision):
    words = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64", "--epochs", "10"]
    words += ["--precision", precision, "--run", "r"]
    command = ["horovodrun", "-np", "1", sys.executable, "-m", "hvdtrain.effnet", *words]
    subprocess.run(command, cwd=tmp_path, check=True)
    folder = tmp_path / "runs" / "effnet" / "r"
    assert json.loads((folder / "result.json").read_text())["eval_accuracy"] > 0.9
    assert json.loads((folder / "placement.json").read_text())["ranks"][0]["device"] == "cuda:0"


def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path):
    words = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64", "--epochs", "3"]
    words += ["--deterministic", "--checkpoint-every", "20steps"]

    def train(run, **variables):
        command = [sys.executable, "-m", "hvdtrain.effnet", *words, "--run", run]
        return subprocess.run(command, cwd=tmp_path, env={**os.environ, **variables}, check=False).returncode

    statuses = [train("whole"), train("killed", HVDTRAIN_FAULT="kill@rank0:step50"), train("killed")]
    assert statuses == [0, -signal.SIGKILL, 0]
    folders = [tmp_path / "runs" / "effnet" / run for run in ("whole", "killed")]
    assert json.loads((folders[1] / "result.json").read_text())["resumed"] == 1
    ranks = [json.loads((folder / "ranks" / "rank-0.json").read_text()) for folder in folders]
    assert ranks[0]["weights_sha256"] == ranks[1]["weights_sha256"]


def test_two_ranks_on_one_gpu_are_refused(tmp_path):
    if torch.cuda.device_count() != 1:
        pytest.skip("needs a machine with exactly one GPU")
    words = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64"]
    command = ["horovodrun", "-np", "2", sys.executable, "-m", "hvdtrain.effnet", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "both use GPU" in done.stdout + done.stderr


def test_a_step_never_waits_for_the_device():
    model = models.build("efficientnet_b0", classes=10).to(CUDA, memory_format=torch.channels_last).train()
    built = optim.BUILD["adamw"](optim.parameter_groups(model, 5e-4, decay_all=False), 0.01)
    average = MovingAverage(model, horizon_steps=10.0)
    step = step_of(model, optimizer=built, average=average, witnesses=[], clip_norm=1.0)
    images = torch.randn(8, 3, 32, 32, device=CUDA).contiguous(memory_format=torch.channels_last)
    batch = {"images": images, "labels": torch.arange(8, device=CUDA)}

    def one():
        return step([batch], backward_passes=1, global_count=8, lr=0.01, measure=True)

    one().read()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pending = one()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert pending.read().skipped is None
