"""One rank of bench/start.py: a small training that notes when its ranks had met and when its first step was done.

    mpirun -np 2 python bench/first_step.py OUT ours
    torchrun --nproc-per-node 2 bench/first_step.py OUT ddp

Rank 0 writes {"init": ..., "step": ...} to OUT, in seconds since 1970. Both train efficientnet_tiny in batches of 64:
`ours` is hvdtrain.effnet on the digits, `ddp` a DistributedDataParallel script as short as it can be, on noise.
"""

import json
import os
import sys
import time
from pathlib import Path

from torch import optim
from torch.optim.optimizer import register_optimizer_step_post_hook

BATCH = 64
OURS = "--data digits --model efficientnet_tiny --epochs 1"


class Notes:
    """Each moment the first time that it comes."""

    def __init__(self, out: Path) -> None:
        self._out, self._at_s = out, dict[str, float]()

    def at(self, moment: str) -> None:
        self._at_s.setdefault(moment, time.time())

    def write(self, rank: int) -> None:
        if rank == 0:
            self._out.write_text(json.dumps(self._at_s))


def ours(notes: Notes) -> None:
    import hvdtrain
    from hvdtrain import effnet
    from hvdtrain.ranks.comm import HorovodComm
    from hvdtrain.vision.settings import RECIPES, EffnetSettings, resolve

    start = HorovodComm.start

    def start_and_note(comm: HorovodComm, timeline: Path | None = None) -> None:
        start(comm, timeline)
        notes.at("init")

    HorovodComm.start = start_and_note  # type: ignore[assignment,method-assign]
    sys.argv = ["effnet", *OURS.split(), "--batch-size-per-rank", str(BATCH)]

    def main(run: hvdtrain.Run[EffnetSettings]) -> None:
        effnet.main(run)
        notes.write(run.ranks.rank)

    hvdtrain.start(main, *RECIPES.values(), resolve=resolve)


def ddp(notes: Notes) -> None:
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    from hvdtrain.vision.models import build

    dist.init_process_group("gloo")
    notes.at("init")
    model = DistributedDataParallel(build("efficientnet_tiny", classes=10, stem_stride=1))
    optimizer = optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    for _ in range(3):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    notes.write(dist.get_rank())
    dist.destroy_process_group()


if __name__ == "__main__":
    notes = Notes(Path(sys.argv[1]))
    register_optimizer_step_post_hook(lambda *_: notes.at("step"))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    {"ours": ours, "ddp": ddp}[sys.argv[2]](notes)
