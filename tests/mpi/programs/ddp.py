"""A step of DistributedDataParallel over gloo; every rank writes rank-<r>.json; usage: ddp.py FOLDER."""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")

dist.init_process_group("gloo")
rank = int(os.environ["RANK"])
model = DistributedDataParallel(nn.Linear(4, 1, bias=False))
model(torch.full((1, 4), rank + 1.0)).sum().backward()
weight = model.module.weight
assert weight.grad is not None
facts = {"gradient": weight.grad.flatten().tolist(), "weight": weight.flatten().tolist()}
facts |= {name: os.environ[name] for name in NAMES}
(Path(sys.argv[1]) / f"rank-{rank}.json").write_text(json.dumps(facts))
dist.destroy_process_group()
