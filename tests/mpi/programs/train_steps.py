"""Some epochs of real training whose batch norm does not depend on the number of ranks.

argv: folder, global batch, micro-batch, frozen|synced, horovod|bucket. Writes the samples seen and saves the weights.
"""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import torch

from hvdtrain.core.position import Position
from hvdtrain.feed.feed import Feed, Resident
from hvdtrain.feed.order import BatchSizes
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.reports import Reports
from hvdtrain.model.batch_norm import layers
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim, sync_batch_norm
from hvdtrain.sync.reducers import sum_gradients
from hvdtrain.tracking.gauges import Gauges
from hvdtrain.vision import images, models
from hvdtrain.vision.augment import Augmentations
from tests.steps import CPU, loop_of, rate_of, step_of, task_of

folder, global_batch, micro_batch = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
batch_norm, reducer = sys.argv[4:]
EPOCHS = 2

comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
torch.set_num_threads(1)
comm.start()
digits = images.digits()


class Recording(Resident):
    seen: ClassVar[list[list[int]]] = []

    def batches(self, indices, device, *phases):
        self.seen.append([int(sample) for part in indices for sample in part])
        return super().batches(indices, device, *phases)


recording = Recording(**{name: tensor[:201] for name, tensor in digits.train.tensors.items()})
split = replace(digits, train=recording)
torch.manual_seed(comm.rank)  # so that the broadcast has something to do
model = models.build("efficientnet_tiny", classes=10, dropout=0.0)
comm.broadcast_(model.state_dict().values())
if batch_norm == "frozen":
    for layer in layers(model):
        layer.train = lambda _=True: None  # for good
        layer.training = False
elif comm.size > 1:
    sync_batch_norm.convert(model, comm)
model = model.to(memory_format=torch.channels_last)
groups = optim.parameter_groups(model, 5e-4, decay_all=False)
task = task_of(
    split,
    augmentations=Augmentations(crop=True, cutout=4),
    label_smoothing=0.1,
    seed=7,
    memory_format=torch.channels_last,
)
step = step_of(
    model,
    task=task,
    optimizer=optim.BUILD["sgd"](groups, 0.1),
    comm=comm,
    sync=sum_gradients(comm, model, Wire(comm.size, is_half=False), reducer=reducer, bucket_mb=0.25),
)
steps = -(-len(recording) // global_batch)
sizes = BatchSizes(micro_batch=micro_batch, global_batch=global_batch, steps_per_epoch=steps)
feed = Feed(recording, task, comm.data, sizes, seed=7, device=CPU)
before = torch.cat([one.detach().flatten().clone() for one in model.parameters()])
reports = Reports(comm, lambda _: Gauges(dict), task, every_steps=2, device=CPU)
limits = Limits(step, max_skipped_steps=1, check_replicas_every=0)
rate = rate_of(0.02, EPOCHS * steps)
loop = loop_of(step, feed, reports=reports, rate=rate, limits=limits, test=split.test, epochs=EPOCHS)
for epoch in range(EPOCHS):
    for _ in loop.steps(Position(step=epoch * steps, epoch=epoch)):
        pass
weights = torch.cat([one.detach().flatten() for one in model.parameters()])
statistics = [one.flatten() for one in model.buffers() if one.is_floating_point()]
torch.save(torch.cat([weights, *statistics]), folder / f"weights-{comm.rank}.pt")
answer = {"seen": Recording.seen, "moved": (weights - before).norm().item(), "folder": str(folder)}
(folder / f"rank-{comm.rank}.json").write_text(json.dumps(answer))
