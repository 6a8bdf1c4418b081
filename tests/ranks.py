"""One rank among others that are not there, and ranks that are threads of this process."""

import json
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import BadInput


class Rank(SerialComm):
    """Rank `rank` of `size`: it is told what the others would say, and keeps what it says itself.

    `answers` is what `allgather` returns: one list for each call in turn, with `...` for this rank's own value, or a
    function of that value; without it all ranks say the same. `others` are added by `begin_sum`. `allreduce` and
    `average_` change nothing unless `sums` and `averages` do.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        answers: Sequence[list[Any]] | Callable[[Any], list[Any]] | None = None,
        others: Sequence[list[float]] = (),
        sums: Callable[[torch.Tensor], torch.Tensor] = lambda values: values,
        averages: Callable[[torch.Tensor], object] = id,
        local_rank: int | None = None,
        local_size: int | None = None,
    ) -> None:
        self.rank, self.size = rank, size
        self.local_rank = rank if local_rank is None else local_rank
        self.local_size = size if local_size is None else local_size
        self.answers = answers if answers is None or callable(answers) else list(answers)
        self._others, self._sums, self._averages = others, sums, averages
        self.said, self.summed, self.averaged, self.names = [], [], [], []

    def allgather(self, value):
        self.said.append(json.loads(json.dumps(value)))
        if self.answers is None:
            return [value] * self.size
        if callable(self.answers):
            return self.answers(value)
        return [value if answer is ... else answer for answer in self.answers.pop(0)]

    def allreduce(self, values, name="sum"):
        self.names.append(name)
        self.summed.append(values.clone())
        return self._sums(values)

    def begin_sum(self, values, name):
        self.summed.append(values.clone())
        total = values + sum(torch.tensor(other) for other in self._others)
        return lambda: total

    def average_(self, tensors):
        for tensor in tensors:
            self.averaged.append(tensor)
            if tensor.is_floating_point():
                self._averages(tensor)


def saying(*answers, **place):
    """Rank 0 of as many as there are answers to `allgather`."""
    return Rank(0, len(answers), answers=lambda _: list(answers), **place)


class Together(SerialComm):
    """One of several ranks that hear each other; it counts the bytes that it gives and gets."""

    def __init__(self, rank, values, meeting):
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(values)
        self._values, self._meeting = values, meeting
        self.bytes = 0

    def _exchange(self, value):
        self._values[self.rank] = value
        self._meeting.wait()
        values = list(self._values)
        self._meeting.wait()
        return values

    def allgather(self, value):
        said = json.dumps(value)
        self.bytes += len(said)
        return self._exchange(json.loads(said))

    def gather(self, content):
        contents = self._exchange(content)
        self.bytes += sum(map(len, contents)) if self.rank == 0 else len(content)
        return contents if self.rank == 0 else []

    def broadcast(self, content):
        whole = self._exchange(content)[0]
        self.bytes += len(whole)
        return whole

    def allreduce(self, values, name="sum"):
        names, parts = zip(*self._exchange((name, values.clone())), strict=True)
        assert set(names) == {name}
        return sum(parts)

    def average_(self, tensors):
        for tensor in tensors:
            tensor.copy_(sum(self._exchange(tensor.clone())) / self.size)

    def broadcast_(self, tensors):
        for tensor in tensors:
            tensor.detach().copy_(self._exchange(tensor.detach().clone())[0])

    replica = SerialComm()

    @property
    def data(self):
        return self


def together(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """What `program(comm)` returns on each of so many ranks, or the first error."""
    values, meeting = [None] * size, threading.Barrier(size, timeout=60)

    if size == 1:  # torch compiles in one thread of a process
        return [program(Together(0, values, meeting))]

    def on(rank):
        try:
            return program(Together(rank, values, meeting))
        except BadInput:  # the ranks have agreed on it, and the others are about to raise it
            raise
        except BaseException:
            meeting.abort()  # or the others would wait
            raise

    with ThreadPoolExecutor(size) as threads:
        running = [threads.submit(on, rank) for rank in range(size)]
    errors = [one.exception() for one in running if one.exception() is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [one.result() for one in running]


class Done:
    """A request that has been answered."""

    def Test(self):  # noqa: N802 (MPI's name)
        return True


class Mpi:
    """mpi4py's communicator of some of the ranks of `Together`, whose other communicators all act at the same time."""

    def __init__(self, comm, members=None):
        self._comm = comm
        self._members = list(range(comm.size)) if members is None else members
        self.rank, self.size = self._members.index(comm.rank), len(self._members)

    def _parts(self, value):
        of_all = self._comm._exchange(value)
        return [of_all[member] for member in self._members]

    def Split(self, colour, key):  # noqa: N802
        alike = sorted(
            (key, rank) for theirs, key, rank in self._parts((colour, key, self._comm.rank)) if theirs == colour
        )
        return Mpi(self._comm, [rank for _, rank in alike])

    def Dup(self):  # noqa: N802
        return self

    def Split_type(self, _):  # noqa: N802
        return self  # all are on one host

    def Free(self):  # noqa: N802
        pass

    def allgather(self, content):
        return self._parts(content)

    def Allreduce(self, own, total):  # noqa: N802
        total[...] = sum(self._parts(own.copy()))

    def Iallreduce(self, own, total):  # noqa: N802
        self.Allreduce(own, total)
        return Done()

    def Alltoall(self, own, received):  # noqa: N802
        received[...] = [part[self.rank] for part in self._parts(own.copy())]

    def Allgather(self, own, whole):  # noqa: N802
        whole[...] = np.concatenate(self._parts(own.copy()))

    def Iallgather(self, own, whole):  # noqa: N802
        self.Allgather(own, whole)
        return Done()

    def Iallgatherv(self, own, whole):  # noqa: N802
        parts, counts = self._parts(own.copy()), whole[1]
        assert [len(part) for part in parts] == counts.tolist()
        whole[0][...] = np.concatenate(parts)
        return Done()
