"""Gradients summed over ranks in flat buckets, each sent when its last gradient is there."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.ranks.sync import WireSync
from hvdtrain.ranks.wire import Wire

# Of the first bucket: sums begin early in the backward pass. DDP's has as much.
FIRST_BUCKET_MB = 1.0

BroadcastNames = Callable[[list[str]], list[str]]  # rank 0's
BeginSum = Callable[[Tensor, str], Callable[[], Any]]  # in place, under a name; what it returns waits for the sum


@dataclass(eq=False, slots=True, kw_only=True)
class _Bucket:
    """Gradients that travel together."""

    name: str
    parts: "list[_Part]"
    flat: Tensor  # of all elements: the parts' gradients one after the other
    wire_values: Tensor  # what is summed: the same, or its copy in another type
    missing_count: int = 0  # parts whose gradient is not complete yet
    wait: Callable[[], Any] | None = None  # for the sum, once it has begun


@dataclass(eq=False, slots=True, kw_only=True)
class _Part:
    """A parameter and its gradient's place."""

    name: str
    parameter: nn.Parameter
    passes_left: int = 1  # backward passes that are to come
    bucket: _Bucket | None = None  # until the order is known
    view: Tensor | None = None  # in the bucket, with the parameter's shape and strides


class BucketSync(WireSync):
    """Gradients as views of flat buckets, which need no other buffer to be summed.

    The first step finds out in which order gradients come, and sends them at its end; rank 0's order is everybody's.
    From then on a bucket is sent when its last gradient is complete. Its parts keep the memory format of their
    parameters. Of a fresh gradient, which autograd makes after zero_grad(set_to_none=True), the bucket takes a copy.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        wire: Wire,
        bucket_mb: float,
        broadcast_names: BroadcastNames,
        begin_sum: BeginSum,
    ) -> None:
        """`bucket_mb` in MiB; 0 sends each gradient alone."""
        self._wire = wire
        self._bucket_bytes = bucket_mb * 2**20
        self._broadcast_names, self._begin_sum = broadcast_names, begin_sum
        trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
        self._parts: list[_Part] = []
        self._new_parts: dict[str, _Part] = {}  # without a bucket
        self._arrival_order: dict[str, None] = {}  # their names, as their gradients have come
        self._buckets: list[_Bucket] = []
        for name, parameter in trainable:
            self._add(_Part(name=name, parameter=parameter))

    def _add(self, part: _Part) -> None:
        self._parts.append(part)
        self._new_parts[part.name] = part
        part.parameter.register_post_accumulate_grad_hook(partial(self._complete, part))

    def carry(self, parameter: nn.Parameter) -> None:
        self._add(_Part(name="", parameter=parameter))  # a name that no part of a model has

    def expect(self, backward_passes: int) -> None:
        for part in self._parts:
            part.passes_left = backward_passes
        for bucket in self._buckets:
            assert bucket.wait is None, f"{bucket.name} was sent in a step that did not finish"
            bucket.missing_count = len(bucket.parts)

    def _complete(self, part: _Part, _: Tensor) -> None:
        """A backward pass has given the part its gradient, or added to it."""
        part.passes_left -= 1
        assert part.passes_left >= 0, f"more backward passes through {part.name} than were expected"
        if part.bucket is None:
            self._arrival_order[part.name] = None
        elif part.passes_left > 0:
            _move_gradients([part])  # the next passes add to it where it lies
        else:
            part.bucket.missing_count -= 1
            if part.bucket.missing_count == 0 and self.overlap:
                self._send(part.bucket)

    def _send(self, bucket: _Bucket) -> None:
        _move_gradients(bucket.parts)
        self._wire.pack(bucket.flat, bucket.wire_values)
        bucket.wait = self._begin_sum(bucket.wire_values, bucket.name)

    def finish(self) -> None:
        if self._new_parts:
            self._fill_buckets()
        for bucket in self._buckets:
            if bucket.wait is None:  # a part of it has had fewer passes, or no gradient at all
                self._send(bucket)
        for bucket in reversed(self._buckets):  # with the last sum the others have mostly come: one wait
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None
            self._wire.unpack(bucket.wire_values, bucket.flat)

    def _fill_buckets(self) -> None:
        """Give the parts their places. All ranks do this in the same step: that of their first gradients."""
        remaining = [name for name in reversed(self._new_parts) if name not in self._arrival_order]  # as in backward
        order = [self._new_parts[name] for name in self._broadcast_names([*self._arrival_order, *remaining])]
        first_bytes = min(FIRST_BUCKET_MB * 2**20, self._bucket_bytes)
        for parts in _group_parts(order, first_bytes, self._bucket_bytes):
            self._buckets.append(_make_bucket(f"gradients.{len(self._buckets)}", parts, self._wire))
        self._new_parts.clear()
        self._arrival_order.clear()

    def restart(self, ranks: int) -> None:
        """Forget the sums of a step that was not finished, and the buckets: so many ranks agree on new ones."""
        for part in self._parts:
            part.bucket = part.view = part.parameter.grad = None
            self._new_parts[part.name] = part
        self._buckets.clear()
        self._arrival_order.clear()
        self._wire.resize(ranks)


def _move_gradients(parts: Sequence[_Part]) -> None:
    """Let each part's gradient lie in its place: a copy of a fresh one, zeros where there is none."""
    views, gradients = [], []
    for part in parts:
        assert part.view is not None
        gradient = part.parameter.grad
        if gradient is part.view:
            continue
        if gradient is None:
            part.view.zero_()
        else:
            views.append(part.view)
            gradients.append(gradient)
        part.parameter.grad = part.view
    if gradients:
        torch._foreach_copy_(views, gradients)


def _group_parts(parts: Iterable[_Part], first_bytes: float, bucket_bytes: float) -> list[list[_Part]]:
    """In this order, but each type and device for itself: as many together as fit, and at least one."""
    groups: list[list[_Part]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[_Part], float]] = {}  # with the bytes that are left
    for part in parts:
        kind = (part.parameter.dtype, part.parameter.device)
        current, bytes_left = open_groups.get(kind, ([], -1.0))
        if part.parameter.nbytes > bytes_left:
            current, bytes_left = [], bucket_bytes if groups else first_bytes
            groups.append(current)
        current.append(part)
        open_groups[kind] = (current, bytes_left - part.parameter.nbytes)
    return groups


def _make_bucket(name: str, parts: list[_Part], wire: Wire) -> _Bucket:
    flat = torch.empty(
        sum(part.parameter.numel() for part in parts), dtype=parts[0].parameter.dtype, device=parts[0].parameter.device
    )
    wire_dtype = wire.wire_dtype(flat.dtype)
    wire_values = flat if wire_dtype == flat.dtype else torch.empty_like(flat, dtype=wire_dtype)
    bucket = _Bucket(name=name, parts=parts, flat=flat, wire_values=wire_values)
    start = 0
    for part in parts:
        template = torch.empty_like(part.parameter, device="meta")  # dense, in the parameter's memory format
        part.view = flat.as_strided(template.size(), template.stride(), start)
        part.bucket = bucket
        start += template.numel()
    return bucket
