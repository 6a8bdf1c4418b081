"""Training steps in which one rank's loss or gradients are not finite. argv: folder, precision, where, rank, how.

`where` is loss, gradients, or overflow, which are large ones; `how` is flat, powersgd, or in groups of half the ranks:
local, or fp16, which is two-level on that wire. Three good steps, one bad, three good; local ranks are not synchronized
in between.
"""

import json
import sys
from pathlib import Path

import torch
from torch.amp.grad_scaler import GradScaler

from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.wire import Wire
from hvdtrain.recipe import optim
from hvdtrain.sync.comm import SyncSchedule, group_ranks
from hvdtrain.sync.low_rank import LowRankSync
from hvdtrain.sync.reducers import sum_gradients
from hvdtrain.sync.rounds import local_rounds
from hvdtrain.vision import models
from tests.steps import draft_of, step_of, take

folder, precision, where, culprit, how = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]
comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
if how in {"fp16", "local"}:
    comm = group_ranks(comm, comm.size // 2)
comm.start()
torch.set_num_threads(1)


class Faulty(torch.autograd.Function):
    """The identity, with a gradient that is not finite when asked for."""

    gradient = 1.0

    @staticmethod
    def forward(_ctx, values):
        return values.clone()

    @staticmethod
    def backward(_ctx, gradient):
        return gradient * Faulty.gradient


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = models.build("efficientnet_tiny", classes=10, dropout=0.2)

    def forward(self, images):
        return Faulty.apply(self.body(images))


torch.manual_seed(0)
model = Model().train()
comm.data.broadcast_(model.state_dict().values())
torch.manual_seed(1 + comm.rank)
scaler = GradScaler("cpu", enabled=precision == "fp16", init_scale=128.0)
optimizer = optim.BUILD["sgd"](optim.parameter_groups(model, 5e-4, decay_all=False), 0.01)
if how == "powersgd":
    sync = LowRankSync(model, comm, rank=2)
else:
    sync = sum_gradients(comm.data, model, Wire(comm.size, is_half=how == "fp16"))
step = step_of(
    model,
    optimizer=optimizer,
    comm=comm,
    sync=sync,
    scaler=scaler,
    precision=precision,
    label_smoothing=0.1,
    clip_value=1.0,
    clip_norm=1.0,
)
if how == "local":
    draft = draft_of(comm, model, optimizer, how=sync, scaler=scaler)
    step.slots.when = local_rounds(draft, SyncSchedule(steps=10))
    step.slots.when.begin(0, 0)


def state():
    floats = [*model.parameters(), *(one for one in model.buffers() if one.is_floating_point())]
    return torch.cat([one.detach().flatten() for one in floats])


skipped, unchanged, finite = [], [], []
for number in range(7):
    images, labels = torch.rand(8, 3, 16, 16), torch.randint(0, 10, (8,))
    bad = number == 3
    Faulty.gradient = 1.0
    if bad and comm.rank == culprit:
        if where == "loss":
            images[2, 1, 5, 5] = torch.nan
        elif where == "gradients":
            Faulty.gradient = torch.inf
        elif where == "overflow":
            Faulty.gradient = 1e30
    before = state()
    done = take(step, (images[:5], labels[:5]), (images[5:], labels[5:]), global_count=8 * step.group.size, lr=0.01)
    skipped.append([done.skipped.rank, done.skipped.source] if done.skipped else None)
    unchanged.append(torch.equal(before, state()))
    finite.append(bool(torch.isfinite(state()).all()))
answer = {"skipped": skipped, "unchanged": unchanged, "finite": finite, "scale": scaler.get_scale()}
answer["wire"] = {} if how == "powersgd" else sync.state_dict()
answer["weights"] = torch.cat([one.detach().flatten() for one in model.parameters()]).sum().item()
(folder / f"rank-{comm.rank}.json").write_text(json.dumps(answer))
