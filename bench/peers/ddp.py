"""Plain PyTorch with DistributedDataParallel, as its experts set it for speed.

    PYTHONPATH=bench torchrun --nproc-per-node 2 bench/peers/ddp.py OUT --model efficientnet_b0 --batch 16 --steps 20

Each rank keeps its own batch-norm statistics, as in hvdtrain: DDP's default would broadcast rank 0's at every step.
"""

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel
from workload import Loader, asked, autocast, fast_kernels, optimizer_of, peer_network

chosen = asked()
fast_kernels()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
dist.init_process_group("nccl" if on_gpu else "gloo")
model = peer_network(chosen.model).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
if chosen.compile:
    model.compile()
ddp = DistributedDataParallel(
    model,
    device_ids=[device.index] if on_gpu else None,
    gradient_as_bucket_view=True,
    static_graph=True,
    broadcast_buffers=False,
)
optimizer = optimizer_of(ddp)
loader = Loader(chosen, device, dist.get_rank())
ddp.train()
for images, labels in loader:
    with autocast(chosen, device):
        loss = F.cross_entropy(ddp(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
loader.answer()
dist.destroy_process_group()
