"""A replica on two ranks of a simulated GPU each, one after the other: stages, and slices of layers."""

from contextlib import nullcontext

import pytest
import torch.distributed as dist

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.ranks.members import MpiMembers
from hvdtrain.replica import point_to_point
from hvdtrain.safety.calls import NOWHERE
from tests.simgpu.cases import CLASSIFY, EFFNET, FACTORS
from tests.simgpu.programs import Prepared
from tests.simgpu.simulator import nccl
from tests.simgpu.simulator.cuda import simulated
from tests.simgpu.simulator.tensor import CUDA

MICRO_BATCHES = 2


class Replica(MpiMembers):
    """One of its two ranks: rank 0 is answered by `answer`, rank 1 hears what rank 0 has said."""

    def __init__(self, rank, *, answer=None, of_rank_0=None):
        self.rank, self.size = rank, 2
        self._wait_context, self._others = nullcontext, ()
        self.calls = NOWHERE
        self._answer, self._of_rank_0 = answer, of_rank_0
        self.said = []

    def allgather(self, value):
        self.said.append(value)
        return [value, self._answer(value)] if self.rank == 0 else [self._of_rank_0.said.pop(0), value]


class World(SerialComm):
    """Both ranks; the replica is the only one."""

    def __init__(self, replica):
        self.rank = self.local_rank = replica.rank
        self.size = self.local_size = replica.size
        self.replica, self.allgather = replica, replica.allgather

    replica = None

    @property
    def data(self):
        return SerialComm()


def steps_of(program, words, replica, coming, monkeypatch):
    """Two steps of a rank: its group, waits of the second step, and what became of both."""
    with simulated() as gpu:
        group = nccl.Nccl(gpu, replica.rank, coming)
        monkeypatch.setattr(point_to_point, "join_replica", lambda *_: nccl.join(group))
        made = Prepared(program, words, World(replica), CUDA)
        try:
            done = [made.take().read()]
            before = len(gpu.waits)
            pending = made.take()
            waits = gpu.waits[before:]
            done.append(pending.read())
        finally:
            dist.destroy_process_group()
        del made, pending
    assert [str(finding) for finding in gpu.findings] == []
    return group, waits, done


def names_of(program, words):
    with simulated():
        return [name for name, _ in Prepared(program, words, SerialComm(), CUDA).job.model.named_parameters()]


@pytest.mark.parametrize(
    ("program", "precision"),
    [
        (CLASSIFY, "bf16"),
        pytest.param(EFFNET, "fp16", marks=pytest.mark.slow),
    ],
)
def test_stages(program, precision, monkeypatch):
    words = [*FACTORS["program"][program].split(), "--accumulate-steps", str(MICRO_BATCHES), "--precision", precision]
    names = names_of(program, words)

    def answer(value):  # the other stage has the other parameters
        is_names = isinstance(value, list) and value and set(map(str, value)) < set(names)
        return [name for name in names if name not in value] if is_names else value

    words += ["--stages", "2", "--stages-at", "2"]
    bound = 1 + (program == CLASSIFY)  # whether the step is skipped, and the norm by which gradients are clipped
    first = Replica(0, answer=answer)
    group, waits, done = steps_of(program, words, first, iter(()), monkeypatch)
    assert [one.skipped for one in done] == [None, None]
    assert len(waits) == bound, "\n".join(map(str, waits))
    second = Replica(1, of_rank_0=first)
    _, waits, done = steps_of(program, words, second, iter(group.sent), monkeypatch)
    assert [one.skipped for one in done] == [None, None]
    assert all(one.totals["loss"] > 0 for one in done)
    assert len(waits) == bound, "\n".join(map(str, waits))
