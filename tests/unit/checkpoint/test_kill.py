"""kill -9 while checkpoints are being written as fast as can be."""

import os
import random
import signal
import time

import pytest

from hvdtrain.checkpoint import state
from hvdtrain.checkpoint.files import clean, find_newest, pack, rank_file_name
from tests.unit.checkpoint.checkpoints import Small, is_whole

KIB = 256
TIMES = 2  # that each step is saved
MOST_S = 0.25  # long enough for some saves


def save_for_ever(root, step, commits):
    """Write each step into the pipe `commits` as soon as it is committed."""
    run = Small(root, newest=step or None)
    run._writer._on_commit = lambda step: os.write(commits, b"%d\n" % step)
    while True:
        step += 1
        for _ in range(TIMES):
            run.begin(step, KIB)
            run.best(step, KIB)


def commits_until_killed(root, step, moment_s):
    """The steps that a process commits that goes on from `step` and is killed after `moment_s`."""
    reader, commits = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            save_for_ever(root, step, commits)
        finally:
            os._exit(1)
    os.close(commits)
    time.sleep(moment_s)
    os.kill(pid, signal.SIGKILL)
    _, status = os.waitpid(pid, 0)
    assert os.WIFSIGNALED(status), "it failed before the kill"
    with os.fdopen(reader) as lines:
        return [int(line) for line in lines]


@pytest.mark.parametrize("kills", [12, pytest.param(100, marks=pytest.mark.slow)])
def test_a_kill_at_any_moment_loses_no_checkpoint(tmp_path, kills):
    """The newest is whole and never older than the last committed one, also if a step is saved again."""
    root = tmp_path / "checkpoints"
    pack(rank_file_name(0), state.per_rank_state(Small(root).parts))  # so that those who are killed lose no time
    draws, step, in_the_middle, committed = random.Random(1), 0, 0, 0  # noqa: S311
    for _ in range(kills):
        steps = commits_until_killed(root, step, draws.uniform(0, MOST_S))
        step, committed = max([step, *steps]), committed + len(steps)
        in_the_middle += any(root.glob(".*"))
        clean(root)  # a step that was being replaced is put back
        found, passed_over = find_newest(root)
        assert passed_over == []
        assert step == 0 or found.step >= step
        if found is not None:
            assert is_whole(found, found.step)
            step = found.step
    assert in_the_middle > kills / 5  # of writing: the process left a half-written folder
    assert committed > kills / 5
