"""DDP, https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html.

Beyond the tutorial: the optimizer is saved, and the snapshot replaces the one before as a whole, as in the ImageNet
example of torchelastic.
"""

from datetime import timedelta
from pathlib import Path

import digits
import fault
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

fault.begin()
dist.init_process_group("gloo", timeout=timedelta(seconds=digits.TIMEOUT_S))  # for faults
model, first_epoch = digits.model(), 0
optimizer = torch.optim.SGD(model.parameters(), digits.LR, digits.MOMENTUM)
if Path("snapshot.pt").exists():  # for faults
    snapshot = torch.load("snapshot.pt", weights_only=True)  # for faults
    model.load_state_dict(snapshot["model"])  # for faults
    optimizer.load_state_dict(snapshot["optimizer"])  # for faults
    first_epoch = snapshot["epochs_run"]  # for faults
model = DistributedDataParallel(model)
data = fault.data(0, 1280)
sampler = DistributedSampler(data)
loader = DataLoader(data, digits.BATCH, sampler=sampler)
for epoch in range(first_epoch, digits.EPOCHS):
    sampler.set_epoch(epoch)
    for number, (pixels, labels) in enumerate(loader, epoch * len(loader) + 1):
        fault.step(number, lambda: dist.all_reduce(torch.ones(1)))
        optimizer.zero_grad()
        cross_entropy(model(fault.pixels(pixels)), labels).backward()
        optimizer.step()
    if dist.get_rank() == 0:  # for faults
        snapshot = {  # for faults
            "model": model.module.state_dict(),  # for faults
            "optimizer": optimizer.state_dict(),  # for faults
            "epochs_run": epoch + 1,  # for faults
        }  # for faults
        torch.save(snapshot, "snapshot.tmp")  # for faults
        Path("snapshot.tmp").replace("snapshot.pt")  # for faults
fault.end(model)
dist.destroy_process_group()
