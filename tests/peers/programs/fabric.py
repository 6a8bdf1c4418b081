"""Fabric: https://lightning.ai/docs/fabric/stable/fundamentals/convert.html."""

import facts
import lightning
import torch
from torch.utils.data import DataLoader

fabric = lightning.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
model = facts.model()
model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
loader = fabric.setup_dataloaders(DataLoader(facts.data, batch_size=facts.BATCH))
losses = facts.train(model, optimizer, loader, fabric.backward)
facts.report(losses, rank=fabric.global_rank, world_size=fabric.world_size)
