"""Startup time of a run: from the command until the ranks are connected, and until the first step is done.

hvdlaunch, mpirun and horovodrun start hvdtrain.effnet on the digits, torchrun starts a minimal DistributedDataParallel
script with the same model on noise. Goals: none of ours slower than torchrun; `hvdlaunch run` at most 0.3 s slower than
bare mpirun; `hvdlaunch --help` in less than 0.15 s.
"""

import argparse
import json
import os
import sys
import time
from functools import partial
from pathlib import Path

from torch.optim.optimizer import register_optimizer_step_post_hook

from bench.jobs import hvdlaunch, job, mpirun, run, torchrun
from bench.pairs import Case, Table, in_turns, middle, ratio

BATCH = 64
OURS = f"--data digits --model efficientnet_tiny --epochs 1 --batch-size-per-rank {BATCH}"
MET, STEP = "ranks have met, s", "first step done, s"
TORCHRUN = "torchrun, DDP"


def note_steps() -> dict[str, float]:
    """Record moments in seconds since 1970: the first step of an optimizer, once it is done."""
    at_s: dict[str, float] = {}

    def note(*_: object) -> None:
        at_s.setdefault(STEP, time.time())

    register_optimizer_step_post_hook(note)
    return at_s


def ours(out: Path) -> None:
    """Run one rank of hvdtrain.effnet."""
    import hvdtrain
    from hvdtrain import effnet
    from hvdtrain.ranks.comm import HorovodComm
    from hvdtrain.tasks.vision.settings import RECIPES, EffnetSettings, resolve

    at_s, start_horovod = note_steps(), HorovodComm.start

    def start_and_note(comm: HorovodComm, timeline: Path | None = None) -> None:
        start_horovod(comm, timeline)
        at_s[MET] = time.time()

    def main(run: hvdtrain.Run[EffnetSettings]) -> None:
        effnet.main(run)
        if run.ranks.rank == 0:
            out.write_text(json.dumps(at_s))

    HorovodComm.start = start_and_note  # type: ignore[assignment,method-assign]
    sys.argv = ["effnet", *OURS.split()]
    hvdtrain.start(main, *RECIPES.values(), resolve=resolve)


def ddp(out: Path) -> None:
    """Run one rank of the script."""
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    from hvdtrain.tasks.vision.models import build

    at_s = note_steps()
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo")
    at_s[MET] = time.time()
    model = DistributedDataParallel(build("efficientnet_tiny", classes=10, stem_stride=1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.randint(10, (BATCH,))
    torch.nn.functional.cross_entropy(model(images), labels).backward()
    optimizer.step()
    if distributed.get_rank() == 0:
        out.write_text(json.dumps(at_s))
    distributed.destroy_process_group()


def start_s(launch: list[str], program: str) -> dict[str, float]:
    """Return the seconds from the command to each moment."""
    started = time.time()
    return {moment: at - started for moment, at in job(launch, f"cases.start:{program}").items()}


def ends_s(words: list[str]) -> dict[str, float]:
    """Return the seconds from the start of a command to its end."""
    started = time.perf_counter()
    run(words)
    return {STEP: time.perf_counter() - started}


def start(chosen: argparse.Namespace) -> Table:
    """From the command to the first step, compared with torchrun; and the overhead of hvdlaunch itself."""
    table = Table(
        name="start",
        question="Seconds from the command until the ranks have met and the first step, or a command, is done:",
        columns=["np", "command", MET, STEP, "of torchrun's time"],
    )
    for ranks in chosen.np:
        launchers = {
            "hvdlaunch run": partial(start_s, hvdlaunch(ranks), "ours"),
            "mpirun": partial(start_s, mpirun(ranks), "ours"),
            "horovodrun": partial(start_s, ["horovodrun", "-np", str(ranks)], "ours"),
            TORCHRUN: partial(start_s, torchrun(ranks), "ddp"),
            "mpirun true": partial(ends_s, [*mpirun(ranks), "true"]),
            "hvdlaunch run true": partial(ends_s, [*hvdlaunch(ranks), "true"]),
            "hvdlaunch --help": partial(ends_s, [sys.executable, "-m", "launch", "--help"]),
        }
        in_turns(launchers, 1)  # warms the file cache
        measured = in_turns(launchers, chosen.rounds)
        for name, rows in measured.items():
            steps_s, theirs_s = ([row[STEP] for row in of_side] for of_side in (rows, measured[TORCHRUN]))
            trains = MET in rows[0]
            met_s = middle([row[MET] for row in rows]) if trains else None
            table.add(ranks, name, met_s, middle(steps_s), ratio(steps_s, theirs_s) if trains else None)
    return table


CASES = {"start": Case(measure=start, options={"np": [1, 2], "rounds": 10})}
