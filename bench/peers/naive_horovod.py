"""Horovod by the loop of its README and examples.

    PYTHONPATH=bench mpirun -np 2 python bench/peers/naive_horovod.py OUT --model efficientnet_b0 --batch 16 --steps 20

With OMPI_MCA_mpi_yield_when_idle=1 in the environment Open MPI's ranks give up their core while they wait. Not in
channels_last: Horovod refuses to send kernels and gradients that lie so.
"""

import horovod.torch as hvd
import torch
import torch.nn.functional as F
from workload import Loader, asked, autocast, fast_kernels, optimizer_of, peer_network

chosen = asked()
fast_kernels()
hvd.init()
on_gpu = torch.cuda.is_available()
device = torch.device("cuda", hvd.local_rank()) if on_gpu else torch.device("cpu")
if on_gpu:
    torch.cuda.set_device(device)
model = peer_network(chosen.model).to(device)
if chosen.compile:
    model.compile()
optimizer = optimizer_of(model)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())
loader = Loader(chosen, device, hvd.rank(), torch.contiguous_format)
model.train()
for images, labels in loader:
    optimizer.zero_grad()
    with autocast(chosen, device):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
loader.answer()
hvd.shutdown()
