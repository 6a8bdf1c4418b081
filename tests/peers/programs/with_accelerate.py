"""Accelerate: https://huggingface.co/docs/accelerate/basic_tutorials/migration."""

import facts
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = facts.model()
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(facts.data, batch_size=facts.BATCH)
)
losses = []
for step, (inputs, targets) in enumerate(loader, 1):
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(inputs), targets)
    accelerator.backward(loss)
    optimizer.step()
    losses.append(loss.item())
    facts.after_step(step)
facts.report(losses, rank=accelerator.process_index, world_size=accelerator.num_processes)
accelerator.end_training()
