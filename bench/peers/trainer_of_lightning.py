"""Lightning, https://lightning.ai/docs/pytorch/stable/common/checkpointing_intermediate.html; started by torchrun."""

import os
from datetime import timedelta

import digits
import fault
import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = digits.model()

    def training_step(self, batch):
        pixels, labels = batch
        return cross_entropy(self.model(fault.pixels(pixels)), labels)

    def on_train_batch_start(self, batch, batch_idx):
        fault.step(self.global_step + 1, lambda: self.all_gather(torch.ones(1)))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), digits.LR, digits.MOMENTUM)


fault.begin()
lightning.seed_everything(0)
classifier = Classifier()
trainer = lightning.Trainer(
    max_epochs=digits.EPOCHS,
    accelerator="cpu",
    devices=int(os.environ["LOCAL_WORLD_SIZE"]),
    num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
    strategy=DDPStrategy(timeout=timedelta(seconds=digits.TIMEOUT_S)),  # for faults
    callbacks=[ModelCheckpoint("checkpoints", save_last=True, save_on_exception=True)],  # for faults
    logger=False,
)
loader = DataLoader(fault.data(0, 1280), digits.BATCH, shuffle=True)
trainer.fit(classifier, loader, ckpt_path="last")  # for faults
fault.end(classifier)
