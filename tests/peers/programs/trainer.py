"""Trainer: https://huggingface.co/docs/transformers/trainer."""

import facts
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments


class Line(nn.Module):
    def __init__(self):
        super().__init__()
        self.model = facts.model()

    def forward(self, inputs, labels):
        predictions = self.model(inputs)
        return {"loss": nn.functional.mse_loss(predictions, labels), "logits": predictions}


class AfterStep(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        facts.after_step(state.global_step)


arguments = TrainingArguments(
    output_dir="trainer", use_cpu=True, per_device_train_batch_size=facts.BATCH, max_steps=facts.STEPS,
    learning_rate=0.1, logging_steps=1, save_strategy="no", report_to="none",
)  # fmt: skip
samples = [{"inputs": inputs, "labels": targets} for inputs, targets in facts.data]
trainer = Trainer(model=Line(), args=arguments, train_dataset=samples, callbacks=[AfterStep()])
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
facts.report(losses, rank=arguments.process_index, world_size=arguments.world_size)
