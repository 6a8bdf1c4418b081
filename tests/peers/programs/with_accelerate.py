"""Accelerate: https://huggingface.co/docs/accelerate/basic_tutorials/migration."""

import facts
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

accelerator = Accelerator(cpu=True)
model = facts.model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
prepared = accelerator.prepare(model, optimizer, DataLoader(facts.data, batch_size=facts.BATCH))
losses = facts.train(*prepared, accelerator.backward)
facts.report(losses, rank=accelerator.process_index, world_size=accelerator.num_processes)
accelerator.end_training()
