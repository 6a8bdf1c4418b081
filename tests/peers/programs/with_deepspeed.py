"""DeepSpeed: https://www.deepspeed.ai/getting-started/."""

import deepspeed
import facts
import torch

config = {
    "train_micro_batch_size_per_gpu": facts.BATCH,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
}
deepspeed.init_distributed()
model = facts.model()
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=facts.data, config=config
)
losses = []
for step, (inputs, targets) in enumerate(loader, 1):
    loss = torch.nn.functional.mse_loss(engine(inputs), targets)
    engine.backward(loss)
    engine.step()
    losses.append(loss.item())
    facts.after_step(step)
facts.report(losses, rank=deepspeed.comm.get_rank(), world_size=deepspeed.comm.get_world_size())
