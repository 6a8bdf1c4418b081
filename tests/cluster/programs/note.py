"""Leave a file that tells where this rank runs and what it was given; usage: note.py FOLDER."""

import json
import os
import socket
import sys
from pathlib import Path

from hvdtrain.tracking.environment import read_plan

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
note = {
    "rank": rank,
    "local_rank": int(os.environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
    "host": socket.gethostname(),
    "folder": str(Path.cwd()),
    "plan": read_plan(os.environ["HVDLAUNCH_PLAN"]),
    "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES"),
    "NCCL_SOCKET_IFNAME": os.environ.get("NCCL_SOCKET_IFNAME"),
}
(Path(sys.argv[1]) / f"rank-{rank}.json").write_text(json.dumps(note))
