"""DeepSpeed: https://www.deepspeed.ai/getting-started/."""

import deepspeed
import facts

config = {"train_micro_batch_size_per_gpu": facts.BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
deepspeed.init_distributed()
model = facts.model()
engine, _, loader, _ = deepspeed.initialize(
    model=model, model_parameters=model.parameters(), training_data=facts.data, config=config
)
losses = facts.train(engine, engine, loader, engine.backward)
facts.report(losses, rank=deepspeed.comm.get_rank(), world_size=deepspeed.comm.get_world_size())
