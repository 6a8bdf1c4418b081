"""hvdtrain.effnet, whose ranks note when they have taken a step, and what a recovery does when; started by others.

    hvdlaunch run -np 3 --elastic -- python bench/elastic_rank.py WORDS OF hvdtrain.effnet

Each process adds lines of JSON to notes/<pid>.jsonl in its working folder, on the clock of time.monotonic():

    start   its rank, as launched
    took    a step that was taken: step, epoch, how many images of the epoch all ranks have visited by then, and the
            time of a core that the process has used
    lost    it has noticed that ranks were lost, or that newcomers are ready
    stage   of that: its name, and the seconds that it took
    closed  it goes on
"""

import json
import os
import runpy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hvdtrain.core.position import Position
from hvdtrain.elastic import recovery
from hvdtrain.elastic.comm import ElasticComm
from hvdtrain.elastic.recovery import Survivors
from hvdtrain.loop.progress import Progress
from hvdtrain.safety import exits

STAGES = {
    "ranks that are left": (ElasticComm, "shrink"),
    "end of Horovod": (ElasticComm, "stop"),
    "start of Horovod": (ElasticComm, "start"),
    "check of replicas": (recovery, "check_replicas"),
}

took, recover = Progress.took, Survivors.recover
closing = False


def note(what: str, **more: Any) -> None:
    line = json.dumps({"what": what, "at_s": time.monotonic(), **more})
    with Path(f"notes/{os.getpid()}.jsonl").open("a") as notes:
        notes.write(f"{line}\n")


def taking(self: Progress, step: int, visited: int) -> None:
    note("took", step=step, epoch=self.position.epoch, visited=visited, cpu_s=time.process_time())
    took(self, step, visited)


def recovering(self: Survivors, change: Exception) -> Position:
    global closing  # noqa: PLW0603
    note("lost")
    closing = True
    position = recover(self, change)
    closing = False
    note("closed")
    return position


def timed(name: str, stage: Callable[..., Any]) -> Callable[..., Any]:
    """The same stage, noted in a recovery."""

    def staged(*given: Any, **named: Any) -> Any:
        began_s = time.monotonic()
        answer = stage(*given, **named)
        if closing:
            note("stage", name=name, took_s=time.monotonic() - began_s)
        return answer

    return staged


if __name__ == "__main__":
    Path("notes").mkdir(exist_ok=True)
    Progress.took, Survivors.recover = taking, recovering  # type: ignore[method-assign]
    for name, (owner, method) in STAGES.items():
        setattr(owner, method, timed(name, getattr(owner, method)))
    note("start", rank=exits.launched_rank())
    runpy.run_module("hvdtrain.effnet", run_name="__main__", alter_sys=True)
