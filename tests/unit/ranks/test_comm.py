from contextlib import contextmanager

import pytest
import torch

from hvdtrain.ranks import waits
from hvdtrain.ranks.comm import SerialComm


def test_serial_comm_is_alone_and_changes_nothing():
    alone = SerialComm()
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert alone.allgather({"a": 1}) == [{"a": 1}]
    assert (alone.gather(b"a"), alone.broadcast(b"a")) == ([b"a"], b"a")
    assert (alone.data.size, alone.replica.size) == (1, 1)
    alone.start()
    values = torch.tensor([1.0, 2.0])
    assert alone.allreduce(values).tolist() == alone.allreduce(values, "some.name").tolist() == [1.0, 2.0]
    alone.average_([values])
    assert values.tolist() == [1.0, 2.0]


@pytest.mark.parametrize(("takes_s", "noted"), [(0.004, []), (0.006, ["begins", "ends"])])
def test_a_wait_is_noted_once_it_is_not_short(monkeypatch, takes_s, noted):
    told = []

    class Clock:
        now_s = 0.0

        def monotonic(self):
            return self.now_s

        def sleep(self, seconds):
            assert 0 < seconds <= 0.001
            self.now_s += seconds

    @contextmanager
    def wait_context():
        told.append("begins")
        yield
        told.append("ends")

    clock = Clock()
    monkeypatch.setattr(waits, "time", clock)
    waits.wait_until(lambda: clock.now_s >= takes_s, wait_context)
    assert told == noted
