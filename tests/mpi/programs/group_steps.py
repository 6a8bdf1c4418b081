"""Two epochs of training by groups of ranks; the plain loop of the same is in tests/mpi/test_groups.py.

argv: folder, steps of a round (0: all groups at every step), ranks of a group, none|fp16. Saves the weights of each
rank, of its moving average and what the optimizer remembers.
"""

import sys
from pathlib import Path

import torch

from hvdtrain.insight.tracking.gauges import Gauges
from hvdtrain.loop.feed.feed import Feed
from hvdtrain.loop.feed.order import BatchSizes
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.reports import Reports
from hvdtrain.parallel.sync.comm import SyncSchedule, group_ranks
from hvdtrain.parallel.sync.reducers import sum_gradients
from hvdtrain.parallel.sync.rounds import local_rounds
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import MovingAverage
from tests.mpi.test_groups import CLIP_NORM, EPOCHS, GLOBAL_BATCH, IMAGES, LR, MICRO_BATCH, images, net
from tests.steps import CPU, draft_of, loop_of, rate_of, step_of, task_of

folder, every_steps, group_size, wire = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]

comm = group_ranks(connect(fusion_threshold_mb=0.0, cycle_time_ms=None), group_size)
comm.start()
torch.manual_seed(comm.rank)  # so that the broadcast has something to do
model = net()
comm.data.broadcast_(model.state_dict().values())
data = images()
task = task_of(data)
optimizer = optim.BUILD["sgd"](optim.parameter_groups(model, 5e-4, decay_all=True), LR)
average = MovingAverage(model, horizon_steps=5)
sync = sum_gradients(comm.data, model, Wire(comm.size, is_half=wire == "fp16"))
step = step_of(model, task=task, optimizer=optimizer, comm=comm, sync=sync, average=average, clip_norm=CLIP_NORM)
if every_steps:
    draft = draft_of(comm, model, optimizer, how=sync, average=average)
    step.slots.when = local_rounds(draft, SyncSchedule(steps=every_steps))
steps = -(-IMAGES // GLOBAL_BATCH)
sizes = BatchSizes(micro_batch=MICRO_BATCH, global_batch=GLOBAL_BATCH, steps_per_epoch=steps)
feed = Feed(data.train, task, comm, sizes, seed=7, device=CPU)
reports = Reports(comm, Gauges(dict), task, every_steps=2, device=CPU)
limits = Limits(step, max_skipped_steps=1, check_replicas_every=1)
rate = rate_of(LR, EPOCHS * steps)
loop = loop_of(step, feed, reports=reports, rate=rate, limits=limits, test=data.test, epochs=EPOCHS)
for _ in loop:
    pass
left = {
    "weights": [one.detach() for one in model.parameters()],
    "momenta": [optimizer.state[one]["momentum_buffer"] for one in model.parameters()],
    "average": [one.detach() for one in average.module.parameters()],
}
torch.save(
    {name: torch.cat([one.flatten() for one in parts]) for name, parts in left.items()}, folder / f"{comm.rank}.pt"
)
