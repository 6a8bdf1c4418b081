"""The reference recipe (docs/accuracy.md) as its program trains: DDP, or DataParallel over all GPUs of one process.

    PYTHONPATH=bench torchrun --nproc-per-node 1 bench/peers/reference.py OUT --model efficientnet_b7 --batch 8
    PYTHONPATH=bench python bench/peers/reference.py OUT --model efficientnet_b7 --batch 256

A DataLoader with two workers that start anew in each epoch, PIL images, ToTensor alone, Adam, fp32, NCHW.
"""

import os
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CIFAR10
from torchvision.transforms import ToTensor
from workload import WARMUP_STEPS, StepClock, answer, asked, peer_network


class Synthetic(CIFAR10):  # type: ignore[misc]
    """Reads a sample as CIFAR10 does, of random pixels in its shape."""

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.data = random.integers(0, 256, (50_000, 32, 32, 3), dtype=np.uint8)
        self.targets = random.integers(0, 10, 50_000).tolist()
        self.transform, self.target_transform = ToTensor(), None


chosen = asked()
rank, is_ddp = int(os.environ.get("RANK", "0")), "RANK" in os.environ
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
model = peer_network(chosen.model).to(device)
parallel: nn.Module
if is_ddp:
    dist.init_process_group("nccl" if on_gpu else "gloo")
    parallel, batch = DistributedDataParallel(model, device_ids=[device.index] if on_gpu else None), chosen.batch
else:
    parallel, batch = nn.DataParallel(model), chosen.batch * max(1, torch.cuda.device_count())
data = Synthetic()
sampler: DistributedSampler[object] | None = DistributedSampler(data) if is_ddp else None
loader: DataLoader[object] = DataLoader(data, batch_size=batch, shuffle=sampler is None, sampler=sampler, num_workers=2)
optimizer = torch.optim.Adam(parallel.parameters(), lr=1e-4, weight_decay=0.005)
clock = StepClock(device)
parallel.train()
started = time.perf_counter()
first_batch_s = 0.0
for number, (inputs, labels) in enumerate(loader):
    first_batch_s = first_batch_s or time.perf_counter() - started
    clock.mark()
    if number == WARMUP_STEPS + chosen.steps:
        break
    images, targets = inputs.to(device), labels.to(device)
    optimizer.zero_grad()
    loss = F.cross_entropy(parallel(images), targets)
    loss.backward()
    optimizer.step()
if rank == 0:
    answer(chosen.out, clock, device, first_batch_s=first_batch_s)
if is_ddp:
    dist.destroy_process_group()
