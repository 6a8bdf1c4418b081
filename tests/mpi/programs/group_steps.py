"""Two epochs of training by groups of ranks; the plain loop of the same is in tests/mpi/test_groups.py.

argv: folder, steps of a round (0: all groups at every step), the epoch after which rounds begin, ranks of a group.
Saves the weights of each rank, of its moving average and what the optimizer remembers.
"""

import sys
from pathlib import Path

import torch

from hvdtrain.checkpoint.position import Position
from hvdtrain.core.feed import Feed
from hvdtrain.core.loop import Limits, train_epoch
from hvdtrain.core.order import BatchSizes
from hvdtrain.core.reports import Reports
from hvdtrain.ranks.connect import connect
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.sync.comm import Every, in_groups
from hvdtrain.sync.rounds import EVERY_STEP, LocalRounds
from hvdtrain.tracking import gauges
from hvdtrain.tracking.gauges import Gauges
from tests.mpi.test_groups import CLIP_NORM, EPOCHS, GLOBAL_BATCH, IMAGES, LR, MICRO_BATCH, images, net
from tests.steps import CPU, rate_of, step_of, task_of

folder, every_steps, from_epoch, group_size = Path(sys.argv[1]), *map(int, sys.argv[2:])

comm = in_groups(connect(fusion_threshold_mb=0.0, cycle_time_ms=None), group_size)
comm.start()
torch.manual_seed(comm.rank)  # so that the broadcast has something to do
model = net()
comm.data.broadcast_(model)
data = images()
task = task_of(data)
optimizer = optim.BUILD["sgd"](optim.parameter_groups(model, 5e-4, decay_all=True), LR)
average = MovingAverage(model, horizon_steps=5)
sync = comm.data.gradient_sync(model, compression="none")
step = step_of(model, task=task, optimizer=optimizer, comm=comm, sync=sync, average=average, clip_norm=CLIP_NORM)
if every_steps:
    every = Every(steps=every_steps, from_epoch=from_epoch)
    step.rounds = LocalRounds(comm, sync, every=every, optimizer=optimizer, average=average, scaler=step.scaler)
assert every_steps or step.rounds is EVERY_STEP
steps = -(-IMAGES // GLOBAL_BATCH)
sizes = BatchSizes(micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH, steps_per_epoch=steps)
feed = Feed(data.train, task, comm, sizes, seed=7, device=CPU)
for epoch in range(EPOCHS):
    for _ in train_epoch(
        step,
        feed,
        Position(step=epoch * steps, epoch=epoch),
        lr=rate_of(LR, EPOCHS * steps),
        limits=Limits(max_skipped_steps=1, check_replicas_every=1),
        reports=Reports(comm, Gauges(gauges.none), task, every_steps=2, device=CPU),
    ):
        pass
left = {
    "weights": [one.detach() for one in model.parameters()],
    "momenta": [optimizer.state[one]["momentum_buffer"] for one in model.parameters()],
    "average": [one.detach() for one in average.module.parameters()],
}
torch.save(
    {name: torch.cat([one.flatten() for one in parts]) for name, parts in left.items()}, folder / f"{comm.rank}.pt"
)
