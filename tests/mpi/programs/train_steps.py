"""Some epochs of real training whose batch norm does not depend on the number of ranks.

argv: folder, global batch, micro-batch, none|fp16, frozen|synced. Writes the samples seen and saves the weights.
"""

import json
import sys
from pathlib import Path
from typing import ClassVar

import torch
from torch.amp.grad_scaler import GradScaler

from hvdtrain.ranks.comm import connect
from hvdtrain.record import gauges
from hvdtrain.record.gauges import Gauges
from hvdtrain.train import batch_norm as sync_bn
from hvdtrain.train import optim
from hvdtrain.train.divergence import SpikeWatch
from hvdtrain.train.loop import Limits, Pictures, Position, train_epoch
from hvdtrain.train.reports import Reports
from hvdtrain.train.schedule import LearningRate
from hvdtrain.train.step import TrainingStep
from hvdtrain.vision import images as data
from hvdtrain.vision import models

folder, global_batch, micro_batch = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
compression, batch_norm = sys.argv[4], sys.argv[5]
CPU = torch.device("cpu")
EPOCHS = 2

comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
torch.set_num_threads(1)
comm.start()
digits = data.load("digits", Path(), height=32, rank=comm.rank, size=comm.size, workers=1)
train = data.Resident(digits.train.images[:201], digits.train.labels[:201])


class Recording(data.Resident):
    seen: ClassVar[list[list[int]]] = []

    def batches(self, indices, device, *phases):
        self.seen.append([int(one) for part in indices for one in part])
        return super().batches(indices, device, *phases)


recording = Recording(train.images, train.labels)
images = data.Images(**{**digits.__dict__, "train": recording})
torch.manual_seed(comm.rank)  # so that the broadcast has something to do
model = models.build("efficientnet_tiny", classes=10, dropout=0.0)
comm.broadcast_(model)
if batch_norm == "frozen":
    for layer in models.batch_norms(model):
        layer.train = lambda _=True: None  # for good
        layer.training = False
elif comm.size > 1:
    sync_bn.convert(model, comm)
model = model.to(memory_format=torch.channels_last)
groups = optim.parameter_groups(model, 5e-4, decay_all=False)
step = TrainingStep(
    model=model,
    optimizer=optim.build("sgd", groups, 0.1),
    comm=comm,
    sync=comm.gradient_sync(model, compression=compression),
    scaler=GradScaler("cpu", enabled=False),
    precision="fp32",
    label_smoothing=0.1,
    clip_value=None,
    clip_norm=None,
)
pictures = Pictures(
    mean=torch.tensor(images.mean),
    std=torch.tensor(images.std),
    crop=True,
    flip=False,
    cutout=4,
    memory_format=torch.channels_last,
)
reports = Reports(comm, Gauges(gauges.none), every_steps=2, device=CPU)
steps = -(-len(recording) // global_batch)
before = torch.cat([one.detach().flatten().clone() for one in model.parameters()])
for epoch in range(EPOCHS):
    for _ in train_epoch(
        step,
        images,
        pictures,
        start=Position(step=epoch * steps, epoch=epoch),
        seed=7,
        global_batch=global_batch,
        micro_batch=micro_batch,
        lr=LearningRate(peak=0.02, warmup_steps=0, total_steps=EPOCHS * steps, shape="constant"),
        average=None,
        limits=Limits(max_skipped_steps=1, check_replicas_every=0),
        spikes=SpikeWatch(comm.rank),
        reports=reports,
        device=CPU,
    ):
        pass
weights = torch.cat([one.detach().flatten() for one in model.parameters()])
statistics = [one.flatten() for one in model.buffers() if one.is_floating_point()]
torch.save(torch.cat([weights, *statistics]), folder / f"weights-{comm.rank}.pt")
answer = {"seen": Recording.seen, "moved": (weights - before).norm().item(), "folder": str(folder)}
(folder / f"rank-{comm.rank}.json").write_text(json.dumps(answer))
