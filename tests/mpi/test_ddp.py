"""Programs that know nothing of Horovod and MPI."""

import sys

from tests.mpi.conftest import PROGRAMS
from tests.mpi.launched import argv, finished, lines, ranks

DDP = [sys.executable, str(PROGRAMS / "ddp.py"), "."]


def test_a_script_for_torchrun_starts_as_it_is(tmp_path):
    # What a shell or another job has left must not lead astray.
    stale = {"RANK": "7", "WORLD_SIZE": "8", "LOCAL_RANK": "7", "MASTER_ADDR": "192.0.2.1", "MASTER_PORT": "1"}
    done = finished(tmp_path, argv(program=DDP), **stale)
    assert done.returncode == 0, done.stdout + done.stderr
    assert lines(done) == []
    found = ranks(tmp_path)
    assert [one["gradient"] for one in found] == [[1.5] * 4] * 2  # the mean of both
    assert found[0]["weight"] == found[1]["weight"]
    places = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    assert [[one[name] for name in places] for one in found] == [
        ["0", "2", "0", "2", "127.0.0.1"],
        ["1", "2", "1", "2", "127.0.0.1"],
    ]
