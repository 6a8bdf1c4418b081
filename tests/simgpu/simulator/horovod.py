"""Rank 0 of two over Horovod 0.28.1 with NCCL: its Python is Horovod's own, its C++ is modelled.

What the C++ does with an all-reduce on a GPU (files below horovod/): `RecordReadyEvent` on the caller's current stream
(torch/ready_event.cc:57). In a cycle the sums that are ready are fused, up to a number of bytes; Horovod's own stream
waits for the ready events (common/ops/nccl_operations.cc:180); it copies several into a buffer and back, and one alone
is summed in place (:233-247); then a thread waits for an event after that (common/ops/gpu_operations.cc:64-139), and
only then `poll` is true and `synchronize` returns.

The other rank has the same values as this one.
"""

import itertools
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.simgpu.simulator.gpu import Gpu
from tests.simgpu.simulator.streams import Event
from tests.simgpu.simulator.tensor import SimTensor

RANKS = 2
FUSION_BYTES = 128 * 2**20  # Horovod's own threshold
CYCLE_SUMS = 16  # that are asked for in the time of a cycle
_FUNCTION = re.compile(r"horovod_torch_(\w+)_async_torch_(?:cuda_)?(\w+)Tensor")
_TYPES = {"Byte", "Char", "Short", "Int", "Long", "Half", "Float", "Double", "Bool"}  # bfloat16 is none of them


@dataclass(kw_only=True)
class _Sum:
    """One all-reduce, of one tensor or a group of them."""

    handle: int
    pairs: list[tuple[Tensor, Tensor]]  # what is summed, and where the sum goes
    divisor: int  # 1, or the number of ranks for their mean
    ready: Event | None  # None on the host
    done: Event | None = field(default=None)  # once Horovod's stream has been given it

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor, _ in self.pairs)


class HorovodLibrary:
    """`mpi_lib_v2`, the C++ that Horovod's torch binding calls."""

    def __init__(self, gpu: Gpu | None, *, mean: int, fusion_bytes: int) -> None:
        """`mean` is Horovod's number for Average; without a GPU it sums on the host."""
        self._gpu, self._mean, self._fusion_bytes = gpu, mean, fusion_bytes
        self._stream = None if gpu is None else gpu.new_stream()
        self._handles = itertools.count(1)
        self._queue: list[_Sum] = []  # that no cycle has seen
        self._sums: dict[int, _Sum] = {}
        self.responses: list[list[int]] = []  # bytes of the tensors of each sum over ranks

    def __getattr__(self, name: str) -> Any:
        match = _FUNCTION.fullmatch(name)
        if match is None or match[2] not in _TYPES:
            raise AttributeError(name)
        return getattr(self, f"_begin_{match[1]}")

    def _begin_allreduce(self, tensor: Tensor, output: Tensor, *options: Any) -> int:
        return self._begin([(tensor, output)], *options)

    def _begin_grouped_allreduce(self, tensors: Any, outputs: Any, *options: Any) -> int:
        return self._begin(list(zip(tensors, outputs, strict=True)), *options)

    def _begin(self, pairs: list[tuple[Tensor, Tensor]], *options: Any) -> int:
        divisor, _, kind, before, after, _ = options
        assert (divisor, before, after) == (1, 1.0, 1.0)
        begun = _Sum(
            handle=next(self._handles),
            pairs=pairs,
            divisor=RANKS if kind == self._mean else 1,
            ready=None if self._gpu is None or not isinstance(pairs[0][0], SimTensor) else self._gpu.new_event(),
        )
        self._sums[begun.handle] = begun
        if begun.ready is None:
            for tensor, output in pairs:
                output.copy_(tensor * RANKS / begun.divisor)
        else:
            begun.ready.record()
            self._queue.append(begun)
            if len(self._queue) == CYCLE_SUMS:
                self.cycle()
        return begun.handle

    def _begin_allgather(self, tensor: Tensor, output: Tensor, _: bytes, __: int) -> int:
        gathered = torch.cat([tensor] * RANKS)
        output.resize_(gathered.shape).copy_(gathered)
        return self._done()

    def _begin_broadcast(self, tensor: Tensor, output: Tensor, root: int, _: bytes, __: int) -> int:
        assert (root, output.data_ptr()) == (0, tensor.data_ptr()) or isinstance(tensor, SimTensor)
        return self._done()

    def _done(self) -> int:
        handle = next(self._handles)
        self._sums[handle] = _Sum(handle=handle, pairs=[], divisor=1, ready=None)
        return handle

    def horovod_torch_poll(self, handle: int) -> int:
        """Whether it is done; the host looks until it is, as often as the device takes."""
        self._wait(self._sums[handle])
        return 1

    def horovod_torch_wait_and_clear(self, handle: int) -> None:
        """Return once it is done."""
        self._wait(self._sums.pop(handle))

    def _wait(self, one: _Sum) -> None:
        if one.ready is None:
            return
        if one.done is None:
            self.cycle()
        assert one.done is not None
        if not one.done.is_known:
            one.done.synchronize()

    def cycle(self) -> None:
        """Give Horovod's stream all that has been asked for, fused."""
        while self._queue:
            first = self._queue.pop(0)
            fused = [first]
            for other in list(self._queue):
                same = (other.divisor, other.pairs[0][0].dtype) == (first.divisor, first.pairs[0][0].dtype)
                if same and sum(one.nbytes for one in (*fused, other)) <= self._fusion_bytes:
                    fused.append(other)
                    self._queue.remove(other)
            self._respond(fused)

    @torch.no_grad()
    def _respond(self, fused: list[_Sum]) -> None:
        assert self._gpu is not None
        assert self._stream is not None
        pairs = [pair for one in fused for pair in one.pairs]
        with self._stream:
            for one in fused:
                assert one.ready is not None
                one.ready.wait()
            if len(pairs) == 1:
                [(tensor, output)] = pairs
                summed = [output if output is tensor else output.copy_(tensor)]
            else:
                summed = [tensor.clone() for tensor, _ in pairs]  # its buffer
            for values in summed:
                values.mul_(RANKS).div_(fused[0].divisor)
            if len(pairs) > 1:
                for (_, output), values in zip(pairs, summed, strict=True):
                    output.copy_(values)
            done = self._gpu.new_event()
            done.record()
        for one in fused:
            one.done = done
        self.responses.append([tensor.nbytes for tensor, _ in pairs])


_FACTS = {"size": RANKS, "local_size": RANKS, "is_initialized": 1, "nccl_built": 1, "is_homogeneous": 1}


class _Basics:
    """What Horovod's Python asks of the library by ctypes."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_: _FACTS.get(name.removeprefix("horovod_"), 0)


@contextmanager
def two_ranks(gpu: Gpu | None, *, fuses: bool = True) -> Iterator[HorovodLibrary]:
    """Horovod has started, with NCCL if there is a GPU: HorovodComm(None) is rank 0 of two."""
    from horovod.common.process_sets import global_process_set
    from horovod.torch import mpi_ops

    library = HorovodLibrary(gpu, mean=mpi_ops.Average, fusion_bytes=FUSION_BYTES if fuses else 0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mpi_ops, "mpi_lib", library)
        patch.setattr(mpi_ops._basics, "MPI_LIB_CTYPES", _Basics())
        patch.setattr(mpi_ops, "_handle_map", {})
        patch.setattr(global_process_set, "ranks", list(range(RANKS)))
        yield library
