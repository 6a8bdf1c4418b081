"""Kill a process that saves as fast as it can, again and again, and check what it leaves."""

import os
import random
import signal
import time

from hvdtrain.checkpoint import state
from hvdtrain.checkpoint.files import clean, find_newest, pack, rank_file_name
from tests.unit.checkpoint.checkpoints import Small, is_whole

KIB = 256
MOST_S = 0.25  # long enough for some saves


def save_for_ever(root, step, times, commits):
    """Write each step into the pipe `commits` as soon as it is committed."""
    run = Small(root, newest=step or None)
    run.writer._on_commit = lambda step: os.write(commits, b"%d\n" % step)
    while True:
        step += 1
        for _ in range(times):
            run.begin(step, KIB)
            run.best(step, KIB)


def commits_until_killed(root, step, times, moment_s):
    """The steps that a process commits that goes on from `step` and is killed after `moment_s`."""
    reader, commits = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_for_ever(root, step, times, commits)
        finally:
            os._exit(1)
    os.close(commits)
    time.sleep(moment_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it failed before the kill"
    with os.fdopen(reader) as lines:
        return [int(line) for line in lines]


def outcome_of(root, kills, times):
    """What was found after so many kills, where each step is saved so many times."""
    # so that those who are killed have no time to lose
    pack(rank_file_name(0), state.per_rank_state(Small(root).parts))
    draws = random.Random(1)  # noqa: S311
    outcome = {"kills": kills, "older": 0, "passed over": 0, "in the middle": 0, "committed": 0}
    step = 0
    for _ in range(kills):
        committed = commits_until_killed(root, step, times, draws.uniform(0, MOST_S))
        step = max([step, *committed])
        outcome["committed"] += len(committed)
        outcome["in the middle"] += any(root.glob(".*"))
        if times > 1:  # a step that was being replaced is put back
            clean(root)
        found, passed_over = find_newest(root)
        outcome["passed over"] += len(passed_over)
        outcome["older"] += step > 0 and (found is None or found.step < step)
        if found is not None:
            assert is_whole(found, found.step)
            step = found.step
    return outcome
