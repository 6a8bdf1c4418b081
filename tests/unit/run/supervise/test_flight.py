import os
import pickle
import runpy

import pytest

from launch.run.supervise import failure
from launch.run.supervise.failure import explain
from launch.run.supervise.rank_logs import Logs, RankReport
from launch.run.supervise.traces.calls import WORLD, compare
from launch.run.supervise.traces.flight import parse_dump
from tests.unit.run.supervise.test_failure import SLOTS
from tests.unit.run.supervise.test_launcher_output import KILLED, fed

TORCH = {"filename": "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", "line": 3068}


def entry(number, kind="all_reduce", sizes=([2],), *, ended=True, line=7, group=("0", "default_pg"), **more):
    """A call as torch 2.11 writes it, without the times."""
    return {
        "collective_seq_id": number,
        "frames": [{**TORCH, "name": "all_reduce"}, {"filename": "/home/me/train.py", "line": line, "name": "metric"}],
        "input_sizes": list(sizes),
        "is_p2p": False,
        "process_group": group,
        "profiling_name": f"nccl:{kind}",
        "retired": ended,
        "state": "completed" if ended else "started",
        **more,
    }


def dump(*entries):
    return pickle.dumps({"version": "2.10", "entries": list(entries)}, protocol=2)


def test_the_calls_of_torch_are_compared():
    steps = [entry(number) for number in (1, 2, 3)]
    late = dump(*steps, entry(4, ended=False, line=88), entry(5, ended=False))
    others = [dump(*steps, entry(4, sizes=[[64, 8], [64]], ended=False)) for _ in range(2)]
    ranks = {rank: parse_dump(content) for rank, content in enumerate([others[0], late, others[1]])}
    assert compare(ranks, of="torch.distributed") == (
        'rank 1 waits in all_reduce "2" (train.py:88), its call 4; ranks 0, 2 wait in all_reduce "64x8 64" '
        "(train.py:7), their call 4: rank 1 made a call that the others did not"
    )


def test_the_error_has_the_calls_of_scripts_of_others(tmp_path, monkeypatch):
    monkeypatch.setattr(failure, "silent_host", lambda *_: None)
    for rank, late in enumerate([None, entry(2, ended=False), entry(2, ended=False)]):
        (tmp_path / f"torch-calls-{rank}").write_bytes(dump(entry(1), *([late] if late else [])))
    logs = Logs(folder=tmp_path, python="python")
    aborted = fed(KILLED.replace(b"signal 9", b"signal 6"))[0]
    assert explain(134, aborted, SLOTS, RankReport(), logs=logs)[0].endswith(
        '; rank 0 is outside of torch.distributed\'s calls, its last was all_reduce "2" (train.py:7), call 1; '
        'ranks 1, 2 wait in all_reduce "2" (train.py:7), their call 2'
    )


def test_groups_have_their_own_numbers_and_exchanges_are_left_out():
    own = entry(1, "all_gather", group=("3", "tensor"), ended=False)
    groups = parse_dump(dump(entry(1), own, entry(2, "send", is_p2p=True), entry(2)))
    assert {name: list(calls) for name, calls in groups.items()} == {WORLD: [1, 2], "3 tensor": [1]}
    assert str(groups["3 tensor"][1]) == "all_gather in 3 tensor (train.py:7)"


class Evil:
    def __reduce__(self):
        return os.system, ("touch evil",)


@pytest.mark.parametrize("content", [b"", b"\x80", dump(entry(1))[:-9], dump({}), pickle.dumps([Evil()])])
def test_a_dump_that_is_torn_or_asks_for_code_is_none(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert parse_dump(content) == {}
    assert list(tmp_path.iterdir()) == []


def test_a_dump_of_this_torch(tmp_path, monkeypatch):
    program = tmp_path / "train.py"
    program.write_text(
        "import torch, torch.distributed as dist\n"
        "from torch._C._distributed_c10d import _dump_fr_trace\n"
        "dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)\n"
        "dist.all_reduce(torch.ones(4, 2))\n"
        "dump = _dump_fr_trace()\n"
        "dist.destroy_process_group()\n"
    )
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "100")
    [call] = parse_dump(runpy.run_path(str(program))["dump"])[WORLD].values()
    assert str(call) == 'all_reduce "4x2" (train.py:4)'
