"""DistributedDataParallel with the run folder of hvdtrain, so that both stand in one table.

    PYTHONPATH=. torchrun --nproc-per-node 2 bench/peers/ddp_run.py --data digits --model efficientnet_tiny
    python -m hvdtrain.compare runs

Options are those of hvdtrain.effnet, and so are images, augmentation, model, optimizer and rate. The loop is PyTorch's,
with a DistributedSampler; what it lacks, such as checkpoints, moving averages and agreement, it does not obey.
"""

import json
import os
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from hvdtrain.core.batch_norm import running_statistics
from hvdtrain.core.replicas import whole_hash
from hvdtrain.core.step import precision_context
from hvdtrain.core.task import Sums, Totals, total
from hvdtrain.feed.order import batch_sizes
from hvdtrain.program.assembly import measures_of
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.recipe import optim
from hvdtrain.recipe.schedule import learning_rate
from hvdtrain.settings.notes import columns
from hvdtrain.tracking.run import open_run
from hvdtrain.vision import data, models
from hvdtrain.vision.settings import parse
from hvdtrain.vision.task import image_task


class DdpComm(SerialComm):
    """The ranks of torchrun, for what is written down of them."""

    def __init__(self) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.local_rank, self.local_size = (int(os.environ[name]) for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"))

    def allgather(self, value: Any) -> list[Any]:
        texts = [""] * self.size
        dist.all_gather_object(texts, json.dumps(value))
        return [json.loads(text) for text in texts]

    def average_(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor)
            tensor.div_(self.size)


settings = parse(sys.argv[1:])
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
comm = DdpComm()
images = data.load_on_all(comm, settings)
settings = data.with_choices(comm, settings, images)
task, sizes = image_task(settings, images, device), batch_sizes(settings, samples=len(images.train), ranks=comm.size)
rate = learning_rate(settings, samples=len(images.train), steps_per_epoch=sizes.steps_per_epoch)
torch.manual_seed(settings.seed)
model = models.build(settings.model, classes=images.classes, stem_stride=settings.stem_stride)
model.to(device, memory_format=task.memory_format)
ddp = DistributedDataParallel(
    model, device_ids=[device.index] if on_gpu else None, gradient_as_bucket_view=True, broadcast_buffers=False
)
groups = optim.parameter_groups(model, settings.weight_decay, decay_all=settings.decay_all)
optimizer = optim.BUILD[settings.optimizer](groups, rate.peak)
sampler: DistributedSampler[int] = DistributedSampler(range(len(images.train)), seed=settings.seed)  # type: ignore[arg-type]


def sums_of(samples: Tensor, *, epoch: int | None) -> Sums:
    """What this rank's samples add up to, in training if there is an epoch."""
    split = images.test if epoch is None else images.train
    [raw] = split.batches([samples], device, epoch)
    with precision_context(device, settings.precision):
        return task.loss(ddp.module if epoch is None else ddp, task.prepare(raw, samples, epoch), training=ddp.training)


def total_of_ranks(parts: list[Sums]) -> Totals:
    """The sums over all ranks, by name."""
    names, values = total(parts)
    dist.all_reduce(values)
    return dict(zip(names, values.tolist(), strict=True))


@torch.no_grad()
def test() -> dict[str, float]:
    """The metrics of the test split."""
    ddp.eval()
    comm.average_(running_statistics(model))
    own = torch.arange(len(images.test))[comm.rank :: comm.size]
    metrics = task.metrics(total_of_ranks([sums_of(part, epoch=None) for part in own.split(sizes.micro_batch)]))
    ddp.train()
    return metrics


folder = settings.runs_dir / settings.experiment / (settings.run or "ddp")
if comm.rank == 0:
    (folder / "ranks").mkdir(parents=True)
derived = {
    **asdict(sizes),
    "steps": settings.epochs * sizes.steps_per_epoch,
    "peak_lr": rate.peak,
    "compression": "none",
    "train_samples": len(images.train),
    "test_samples": len(images.test),
    "classes": images.classes,
    "parameters": sum(parameter.numel() for parameter in model.parameters()),
}
comm.allgather("the folder is there")
with open_run(comm, folder, hang_timeout_s=0.0, timeline=False) as run:
    run.start(
        {**asdict(settings), "reducer": "ddp", "ema_epochs": 0.0},
        derived,
        device=device,
        columns=columns(type(settings)),
        measures=measures_of(task),
        memory=None,
    )
    tracker, step = run.tracker, 0
    tracker.result["epochs"] = settings.epochs
    for epoch in range(settings.epochs):
        sampler.set_epoch(epoch)
        started, parts = time.perf_counter(), []
        for samples in torch.tensor(list(sampler)).split(sizes.micro_batch):
            lr = rate(step, sizes.global_batch)
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.zero_grad(set_to_none=True)
            sums = sums_of(samples, epoch=epoch)
            (sums.loss / sums.count).backward()
            optimizer.step()
            parts.append(sums)
            step += 1
            if step % settings.report_every_steps == 0 and tracker.is_writer:
                tracker.add_counts(step, {})
                tracker.report({"train/loss": (sums.loss / sums.count).item(), "train/lr": lr})  # this rank's
        train = total_of_ranks(parts)
        train_s = time.perf_counter() - started
        tracker.add_counts(step, {})
        metrics = tracker.record_epoch(
            epoch + 1,
            count=len(images.train),
            train_s=train_s,
            lr=lr,
            train=task.metrics(train),
            test=test(),
        )
        run.console.print(f"epoch {epoch + 1:>3}/{settings.epochs}  test {task.format_metrics(tracker.last_test)}")
    run.conclude(f"test {task.format_metrics(tracker.last_test)}", weights_sha256=whole_hash(comm, model))
dist.destroy_process_group()
