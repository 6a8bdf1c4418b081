"""Plain PyTorch in one process: the shortest loop.

PYTHONPATH=bench python bench/peers/plain.py OUT --model efficientnet_b0 --batch 16 --steps 20
"""

import torch
import torch.nn.functional as F
from workload import Loader, asked, autocast, fast_kernels, optimizer_of, peer_network

chosen = asked()
fast_kernels()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
model = peer_network(chosen.model).to(device, memory_format=torch.channels_last)  # type: ignore[call-overload]
if chosen.compile:
    model.compile()
optimizer = optimizer_of(model)
loader = Loader(chosen, device)
model.train()
for images, labels in loader:
    with autocast(chosen, device):
        loss = F.cross_entropy(model(images), labels)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
loader.answer()
