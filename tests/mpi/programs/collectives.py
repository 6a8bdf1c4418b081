"""Every operation of a Comm, on values that tell the ranks apart."""

import json
import sys
from pathlib import Path

import torch

from hvdtrain.ranks import comm as ranks
from hvdtrain.ranks.connect import connect

comm = connect(fusion_threshold_mb=None, cycle_time_ms=None)
gathered = comm.allgather({"rank": comm.rank, "text": "ä" * (comm.rank + 1)})
comm.start()
again = comm.allgather([comm.rank] * comm.rank)
said = b"%d" % comm.rank
bytes_gathered = [content.decode() for content in comm.gather(said * (comm.rank + 1))]
ranks._CHUNK_BYTES = 3
whole = [comm.broadcast(said * times).decode() for times in (0, 1, 3, 4, 10)]
total = comm.allreduce(torch.tensor([1.0, comm.rank], dtype=torch.float64)).tolist()
floats = [torch.full((2, 3), float(comm.rank)), torch.tensor([10.0 * comm.rank])]
counter = torch.tensor(comm.rank)
comm.average_([floats[0], counter, floats[1]])
model = torch.nn.BatchNorm1d(3)
with torch.no_grad():
    model.weight.fill_(comm.rank + 5.0)
    model.running_mean.fill_(comm.rank + 7.0)
comm.broadcast_(model.state_dict().values())
TYPES = (torch.bool, torch.int16, torch.bfloat16, torch.complex64, torch.complex128, torch.float8_e4m3fn)
of_types = [torch.full((3,), comm.rank != 0).to(dtype) for dtype in TYPES]
across = torch.full((2, 3), float(comm.rank)).T
comm.broadcast_([*of_types, across])
answer = {
    "rank": comm.rank,
    "size": comm.size,
    "local": [comm.local_rank, comm.local_size],
    "gathered": gathered,
    "again": again,
    "bytes": bytes_gathered,
    "whole": whole,
    "sum": total,
    "average": [floats[0].flatten().tolist(), floats[1].tolist(), counter.item()],
    "broadcast": [model.weight.tolist(), model.running_mean.tolist()],
    "types": [values.to(torch.complex128).abs().sum().item() for values in (*of_types, across)],
}
(Path(sys.argv[1]) / f"rank-{comm.rank}.json").write_text(json.dumps(answer))
