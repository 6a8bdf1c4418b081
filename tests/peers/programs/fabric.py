"""Fabric: https://lightning.ai/docs/fabric/stable/fundamentals/convert.html."""

import facts
import lightning
import torch
from torch.utils.data import DataLoader

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = facts.model()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
losses = []
for step, (inputs, targets) in enumerate(fabric.setup_dataloaders(DataLoader(facts.data, batch_size=facts.BATCH)), 1):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    fabric.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    facts.after_step(step)
facts.report(losses, rank=fabric.global_rank, world_size=fabric.world_size)
