"""A model of many parameters and little arithmetic, whose gradients travel over TCP. argv: folder.

Writes what profile.gather_profile returns.
"""

import json
import sys
from pathlib import Path

import torch
from torch import nn

from hvdtrain.profiling.clocks import HostClock
from hvdtrain.profiling.profile import gather_profile
from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.wire import Wire
from hvdtrain.sync.reducers import sum_gradients
from tests.steps import step_of, take

folder = Path(sys.argv[1])
comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
comm.start()
torch.manual_seed(0)
model = nn.Sequential(nn.Flatten(), nn.Linear(48, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.Linear(4096, 10))
comm.broadcast_(model.state_dict().values())
clock = HostClock()
sync = sum_gradients(comm, model, Wire(comm.size, is_half=False))
optimizer = torch.optim.SGD(model.parameters(), lr=0.001)
step = step_of(model, optimizer=optimizer, comm=comm, sync=sync, phases=clock)
for _ in range(12):
    take(step, (torch.rand(1, 3, 4, 4), torch.zeros(1, dtype=torch.int64)), global_count=comm.size, lr=0.001)
    clock.end_step()
profile = gather_profile(comm, clock)
(folder / f"rank-{comm.rank}.json").write_text(json.dumps(profile.document()))
