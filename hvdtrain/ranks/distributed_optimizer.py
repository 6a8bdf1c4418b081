"""Gradients summed by `hvd.DistributedOptimizer`.

The core, as in Horovod's documentation:

    optimizer = hvd.DistributedOptimizer(optimizer, named_parameters, compression, op=hvd.Sum)
    optimizer.set_backward_passes_per_step(passes)
    ...  # forward and backward
    optimizer.synchronize()

Horovod's optimizer never steps, so it wraps one without state; the run's own optimizer takes the summed gradients. The
private names of Horovod are those of version 0.28.1, which the project pins.
"""

from contextlib import nullcontext
from typing import Any

import horovod.torch as hvd
import torch
from horovod.torch.compression import Compressor
from torch import Tensor, nn

from hvdtrain.ranks.comm import HorovodComm
from hvdtrain.ranks.sync import GradientSync, gradient_of
from hvdtrain.ranks.waits import wait_until
from hvdtrain.ranks.wire import Wire
from hvdtrain.settings.safety.calls import GRADIENTS

Layout = tuple[tuple[int, ...] | None, torch.dtype]  # memory order of the dimensions if not the default, type


class WireCompressor(Compressor):  # type: ignore[misc]  # Horovod has no types
    """Horovod's interface of a Wire, for gradients in any memory layout.

    Horovod itself rejects bfloat16 and tensors that are not contiguous, for example channels_last kernels.
    """

    def __init__(self, wire: Wire) -> None:
        self.wire = wire

    def compress(self, gradient: Tensor) -> tuple[Tensor, Layout]:
        """Return a contiguous tensor to be summed, and the argument of `decompress`."""
        order, values = None, gradient
        if not gradient.is_contiguous():
            order = tuple(sorted(range(gradient.dim()), key=gradient.stride().__getitem__, reverse=True))
            values = gradient.permute(order).contiguous()  # copies only if there are gaps or overlaps
        if self.wire.scale != 1:
            values = values * self.wire.scale
        return values.to(self.wire.wire_dtype(gradient.dtype)), (order, gradient.dtype)

    def decompress(self, total: Tensor, layout: Layout) -> Tensor:
        """Return the sum in the gradient's shape, memory format and type."""
        order, dtype = layout
        if order is not None:
            total = total.permute([order.index(one) for one in range(len(order))])
        return total.to(dtype) if self.wire.scale == 1 else total.to(dtype).div_(self.wire.scale)


class HorovodSync(GradientSync):
    """Sums by `hvd.DistributedOptimizer`; they begin during backward, unless ranks share cores with Horovod."""

    def __init__(self, model: nn.Module, comm: HorovodComm, wire: Wire, *, groups: int | None) -> None:
        """Hook the gradients.

        On CPUs, backward and Horovod's thread, or its own wait and the thread, would compete for a core. Gradients are
        sent after backward then, and the rank polls the sums; only on a single host, because between network namespaces
        polling was slower.
        """
        named = list(model.named_parameters())
        self._trainable = [parameter for _, parameter in named if parameter.requires_grad]
        self._comm, self._wire = comm, wire
        self._shares_cores = comm.local_size == comm.size and self._trainable[0].device.type == "cpu"
        # Sum, not Average: the loss is already divided by the global batch, so that ranks may hold unequal shards.
        self._optimizer: Any = hvd.DistributedOptimizer(
            torch.optim.SGD(self._trainable, lr=0.0),
            named,
            WireCompressor(wire),
            op=hvd.Sum,
            groups=groups and min(groups, len(self._trainable)),
        )
        _find_groups_fast(self._optimizer)

    def expect(self, backward_passes: int) -> None:
        # hooks send nothing while they wait for one more pass
        overlap = self.overlap and not self._shares_cores
        self._optimizer.set_backward_passes_per_step(backward_passes if overlap else backward_passes + 1)

    def finish(self) -> None:
        with self._comm.calls.record("all-reduce", GRADIENTS):
            self._send_rest()
            self._receive()

    def _receive(self) -> None:
        waiting = self._comm.wait_context
        if self._shares_cores:
            handles = [handle for handle, _ in self._optimizer._handles.values()]
            wait_until(lambda: all(map(hvd.poll, handles)), waiting)
            waiting = nullcontext  # all sums are complete
        with waiting():
            self._optimizer.synchronize()

    def _send_rest(self) -> None:
        """Send what no hook has sent, under the names that other ranks use."""
        own = self._optimizer
        for parameter in self._trainable:
            gradient_of(parameter)  # Horovod's own zeros would have another memory format
        for group in own._group_counts:
            if group not in own._handles:
                for parameter in group:
                    own._handles.pop(parameter, None)
                own._handles[group] = own._grouped_allreduce_grad_async(group)
                own._group_counts[group] = 0
        if not own._group_counts:
            for parameter in self._trainable:
                if own._handles.get(parameter, (None, None))[0] is None:
                    own._handles[parameter] = own._allreduce_grad_async(parameter)


class _ParameterGroup(tuple[nn.Parameter, ...]):
    """A tuple of parameters that is hashed by identity."""

    __slots__ = ()

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _find_groups_fast(optimizer: Any) -> None:
    """Replace the groups by tuples hashed by identity: Horovod's hooks use them as keys, and hash every parameter.

    With a single group the time grows with the square of the number of parameters: see "Which reducer and bucket size?"
    in docs/explanation/benchmarks.md.
    """
    groups = {id(group): _ParameterGroup(group) for group in optimizer._group_counts}
    optimizer._p_to_group = {parameter: groups[id(group)] for parameter, group in optimizer._p_to_group.items()}
    optimizer._group_counts = dict.fromkeys(groups.values(), 0)
