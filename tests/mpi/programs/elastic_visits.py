"""hvdtrain.effnet, whose ranks also note which training images they read for which step, and which steps they took.

A step that was undone has the number of another one: `changes` counts the ranks that were lost or joined before.
"""

import json
import runpy
import sys
from pathlib import Path

from hvdtrain.loop.feed import feed
from hvdtrain.loop.progress import Progress
from hvdtrain.parallel.elastic.recovery import Survivors
from hvdtrain.settings.safety import exits

arriving, record_step, go_on, recover = feed.raw_batches, Progress.record_step, Progress.go_on, Survivors.recover
run = {"changes": 0}  # and its progress and notes


def note(what, **more):
    position = run["progress"].position
    place = {"changes": run["changes"], "step": position.step, "epoch": position.epoch}
    run["notes"].write(json.dumps({"what": what, **place, **more}) + "\n")


def noted(split, indices, device, epoch, **more):
    for samples, batch in arriving(split, indices, device, epoch, **more):
        if epoch is not None:
            note("read", samples=samples.tolist())
        yield samples, batch


def going_on(self, position):
    run["progress"] = self
    go_on(self, position)


def noting_step(self, step, visited):
    note("took")
    record_step(self, step, visited)


def recovering(self, change):
    position = recover(self, change)
    counted = self._run.tracker.result
    run["changes"] = counted["lost_ranks"] + counted["joined_ranks"]
    return position


if __name__ == "__main__":  # not in workers that read files
    folder = Path(sys.argv.pop(1))
    folder.mkdir(exist_ok=True)
    run["notes"] = (folder / f"rank-{exits.launched_rank()}.jsonl").open("a", buffering=1)
    feed.raw_batches, Progress.record_step, Progress.go_on, Survivors.recover = noted, noting_step, going_on, recovering
    sys.argv.insert(1, "effnet")
    runpy.run_path(str(Path(__file__).with_name("every_option.py")), run_name="__main__")
