"""Exchanges by torch.distributed, as between GPUs, but over gloo. argv: folder."""

import json
import os
import sys
from pathlib import Path

import torch

from hvdtrain.ranks.connect import connect
from hvdtrain.ranks.links import make_torch_exchange, pair_rounds, time_exchanges

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
exchange = make_torch_exchange(comm, "gloo")
right = []
for pairs in pair_rounds(comm.allgather("one host")):
    for pair in pairs:
        if comm.rank in pair:
            other = sum(pair) - comm.rank
            right.append(time_exchanges(exchange, torch.arange(1000.0), (comm.rank, other), repeats=2)[1])
    comm.allgather(None)
(Path(sys.argv[1]) / f"rank-{comm.rank}.json").write_text(json.dumps(right))
