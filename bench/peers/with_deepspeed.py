"""DeepSpeed, https://www.deepspeed.ai/getting-started/, with its "Model Checkpointing"."""

from datetime import timedelta

import deepspeed
import digits
import fault
import torch
from torch.nn.functional import cross_entropy

fault.begin()
deepspeed.init_distributed(timeout=timedelta(seconds=digits.TIMEOUT_S))  # for faults
model, first_epoch = digits.model(), 0
engine, _, loader, _ = deepspeed.initialize(
    model=model,
    optimizer=torch.optim.SGD(model.parameters(), digits.LR, digits.MOMENTUM),
    training_data=fault.data(0, 1280),
    config={"train_micro_batch_size_per_gpu": digits.BATCH, "zero_allow_untested_optimizer": True},
)
_, state = engine.load_checkpoint("checkpoints")  # for faults
if state:  # for faults
    first_epoch = state["epochs_run"]  # for faults
for epoch in range(first_epoch, digits.EPOCHS):
    loader.data_sampler.set_epoch(epoch)
    for number, (pixels, labels) in enumerate(loader, epoch * len(loader) + 1):
        fault.step(number, lambda: deepspeed.comm.all_reduce(torch.ones(1)))
        engine.backward(cross_entropy(engine(fault.pixels(pixels)), labels))
        engine.step()
    engine.save_checkpoint("checkpoints", client_state={"epochs_run": epoch + 1})  # for faults
fault.end(engine.module)
