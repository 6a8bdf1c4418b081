"""PyTorch: https://docs.pytorch.org/tutorials/beginner/ddp_series_fault_tolerance.html."""

import facts
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

dist.init_process_group("gloo")
model = DistributedDataParallel(facts.model())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(facts.data, batch_size=facts.BATCH, sampler=DistributedSampler(facts.data, shuffle=False))
losses = facts.train(model, optimizer, loader, torch.Tensor.backward)
facts.report(losses, rank=dist.get_rank(), world_size=dist.get_world_size())
dist.destroy_process_group()
