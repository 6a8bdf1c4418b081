"""Accelerate, https://huggingface.co/docs/accelerate/usage_guides/checkpoint; examples/by_feature/checkpointing.py."""

from datetime import timedelta
from pathlib import Path

import digits
import fault
import torch
from accelerate import Accelerator, DataLoaderConfiguration, InitProcessGroupKwargs
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

fault.begin()
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(seconds=digits.TIMEOUT_S))],  # for faults
)
model, first_epoch = digits.model(), 0
optimizer = torch.optim.SGD(model.parameters(), digits.LR, digits.MOMENTUM)
loader = DataLoader(fault.data(0, 1280), digits.BATCH, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
saved = sorted(Path().glob("epoch_*"), key=lambda path: int(path.name.removeprefix("epoch_")))  # for faults
if saved:  # for faults
    accelerator.load_state(str(saved[-1]))  # for faults
    first_epoch = int(saved[-1].name.removeprefix("epoch_"))  # for faults
for epoch in range(first_epoch, digits.EPOCHS):
    loader.set_epoch(epoch)
    for number, (pixels, labels) in enumerate(loader, epoch * len(loader) + 1):
        fault.step(number, lambda: accelerator.reduce(torch.ones(1)))
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(model(fault.pixels(pixels)), labels))
        optimizer.step()
    accelerator.save_state(f"epoch_{epoch + 1}")  # for faults
fault.end(accelerator.unwrap_model(model))
accelerator.end_training()
