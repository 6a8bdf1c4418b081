"""Lightning: https://lightning.ai/docs/pytorch/stable/starter/introduction.html."""

import facts
import lightning
import torch
from torch.utils.data import DataLoader


class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.losses = facts.model(), []

    def training_step(self, batch):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.model(inputs), targets)
        self.losses.append(loss.item())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        facts.after_step(batch_idx + 1)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


line = Line()
trainer = lightning.Trainer(
    max_epochs=1, accelerator="cpu", devices=2, strategy="ddp", logger=False, enable_checkpointing=False
)
trainer.fit(line, DataLoader(facts.data, batch_size=facts.BATCH))
facts.report(line.losses, rank=trainer.global_rank, world_size=trainer.world_size)
