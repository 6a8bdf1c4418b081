"""Elastic Horovod, https://horovod.readthedocs.io/en/stable/elastic.html and pytorch_imagenet_resnet50_elastic.py."""

from pathlib import Path

import digits
import fault
import horovod.torch as hvd
import torch
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

fault.begin()
hvd.init()
model = digits.model()
optimizer = torch.optim.SGD(model.parameters(), digits.LR, digits.MOMENTUM)
data = fault.data(0, 1280)
sampler = hvd.elastic.ElasticSampler(data)  # for faults
loader = DataLoader(data, digits.BATCH, sampler=sampler)
saved = [epoch for epoch in range(1, digits.EPOCHS + 1) if Path(f"checkpoint-{epoch}.pt").exists()]  # for faults
resumed = max(saved, default=0)  # for faults
if resumed and hvd.rank() == 0:  # for faults
    checkpoint = torch.load(f"checkpoint-{resumed}.pt", weights_only=True)  # for faults
    model.load_state_dict(checkpoint["model"])  # for faults
    optimizer.load_state_dict(checkpoint["optimizer"])  # for faults
optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=model.named_parameters())


@hvd.elastic.run  # for faults
def train(state):  # for faults
    while state.epoch < digits.EPOCHS:
        first_batch = state.batch
        for batch, (pixels, labels) in enumerate(loader):
            fault.step(state.steps + 1, lambda: hvd.allreduce(torch.ones(1), name="extra"))
            optimizer.zero_grad()
            cross_entropy(model(fault.pixels(pixels)), labels).backward()
            optimizer.step()
            state.steps += 1
            state.batch = first_batch + batch + 1  # for faults
            state.sampler.record_batch(batch, digits.BATCH)  # for faults
            state.commit()  # for faults
        state.epoch += 1
        state.batch = 0  # for faults
        state.sampler.set_epoch(state.epoch)
        if hvd.rank() == 0:  # for faults
            checkpoint = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}  # for faults
            torch.save(checkpoint, f"checkpoint-{state.epoch}.pt")  # for faults
        state.commit()  # for faults


state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=resumed, batch=0, steps=10 * resumed)
train(state)
fault.end(model)
