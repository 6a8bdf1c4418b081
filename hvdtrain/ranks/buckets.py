"""Sums of gradients in flat buckets; each bucket is sent when its last gradient is complete."""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.ranks.comm import Members
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.ranks.wire import Wire
from hvdtrain.settings.safety.calls import GRADIENTS

# Size of the first bucket: small, so that sums start early in backward. DDP uses the same size.
FIRST_BUCKET_MB = 1.0


@dataclass(eq=False, slots=True, kw_only=True)
class Bucket:
    """Gradients that are sent together."""

    name: str
    parts: "list[BucketSlot]"
    flat: Tensor  # the gradients of all parts, concatenated
    wire_values: Tensor  # the tensor to sum: `flat`, or its copy in another type
    missing_count: int = 0  # number of parts whose gradient is not complete
    wait: Callable[[], Any] | None = None  # waits for the sum, once it has begun


@dataclass(eq=False, slots=True, kw_only=True)
class BucketSlot:
    """A parameter and the place of its gradient."""

    name: str
    parameter: nn.Parameter
    passes_left: int = 1  # backward passes still to come in this step
    bucket: Bucket | None = None  # None until the order is known
    view: Tensor | None = None  # in the bucket, with the parameter's shape and strides


class BucketSync(GradientSync):
    """Keeps gradients as views of flat buckets, which are summed without another buffer.

    The first step records the order in which gradients become complete, and sends them at its end; all ranks use rank
    0's order. After that, a bucket is sent when its last gradient is complete. Parts keep the memory format of their
    parameters. A fresh gradient, which autograd allocates after zero_grad(set_to_none=True), is copied into the bucket.
    """

    def __init__(self, model: nn.Module, comm: Members, wire: Wire, *, bucket_mb: float) -> None:
        """Create the buckets of `bucket_mb` MiB; 0 sends each gradient alone."""
        self._comm = comm
        self._wire: Wire = wire
        self._bucket_bytes = bucket_mb * 2**20
        self._parts: list[BucketSlot] = []
        self._new_parts: dict[str, BucketSlot] = {}  # parts without a bucket
        self._arrival_order: dict[str, None] = {}  # names in the order in which their gradients became complete
        self._buckets: list[Bucket] = []
        self._sent_bytes = 0  # of all buckets
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                self._add(BucketSlot(name=name, parameter=parameter))

    def _add(self, part: BucketSlot) -> None:
        self._parts.append(part)
        self._new_parts[part.name] = part
        part.parameter.register_post_accumulate_grad_hook(partial(self._complete, part))

    def carry(self, parameter: nn.Parameter) -> None:
        self._add(BucketSlot(name="", parameter=parameter))  # a name that no part of a model has

    def expect(self, backward_passes: int) -> None:
        for part in self._parts:
            part.passes_left = backward_passes
        for bucket in self._buckets:
            assert bucket.wait is None, f"{bucket.name} was sent in a step that did not finish"
            bucket.missing_count = len(bucket.parts)

    def _complete(self, part: BucketSlot, _: Tensor) -> None:
        """Record that a backward pass has set or added to the part's gradient."""
        part.passes_left -= 1
        assert part.passes_left >= 0, f"more backward passes through {part.name} than were expected"
        if part.bucket is None:
            self._arrival_order[part.name] = None
        elif part.passes_left > 0:
            _move_gradients([part])  # further passes add to it in place
        else:
            part.bucket.missing_count -= 1
            if part.bucket.missing_count == 0 and self.overlap:
                self._send(part.bucket)

    def _send(self, bucket: Bucket) -> None:
        _move_gradients(bucket.parts)
        self._wire.pack(bucket.flat, bucket.wire_values)
        bucket.wait = self._begin(bucket)

    def _begin(self, bucket: Bucket) -> Callable[[], Any]:
        """Begin to sum a packed bucket; the returned function waits for the sum and unpacks it."""
        wait = self._comm.begin_sum(bucket.wire_values, bucket.name)
        return lambda: self._wire.unpack(wait(), bucket.flat)

    def finish(self) -> None:
        if self._new_parts:
            self._fill_buckets()
        for bucket in self._buckets:
            if bucket.wait is None:  # one of its parts had fewer passes, or no gradient
                self._send(bucket)
        with self._comm.calls.record("all-reduce", GRADIENTS, size=self._sent_bytes):
            self._receive()

    def _receive(self) -> None:
        for bucket in reversed(self._buckets):  # once the last sum is complete, the others usually are: a single wait
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None

    def _fill_buckets(self) -> None:
        """Assign the parts to buckets. All ranks do this in the same step, the first with gradients."""
        remaining = [name for name in reversed(self._new_parts) if name not in self._arrival_order]  # in backward order
        names = self._comm.allgather([*self._arrival_order, *remaining])[0]
        order = [self._new_parts[name] for name in names]
        for parts in self._group(order):
            self._buckets.append(self._make_bucket(f"gradients.{len(self._buckets)}", parts))
        self._sent_bytes = sum(bucket.wire_values.nbytes for bucket in self._buckets)
        self._new_parts.clear()
        self._arrival_order.clear()

    def _group(self, order: Iterable[BucketSlot]) -> list[list[BucketSlot]]:
        """Return the parts of each bucket."""
        return _group_parts(order, min(FIRST_BUCKET_MB * 2**20, self._bucket_bytes), self._bucket_bytes)

    def _make_bucket(self, name: str, parts: list[BucketSlot], *, align: int = 1, ranks: int = 1) -> Bucket:
        """Return a bucket of these parts, which begin at multiples of `align` elements; `ranks` divide it evenly."""
        starts = [0, *itertools.accumulate(-(-part.parameter.numel() // align) * align for part in parts)]
        first, size = parts[0].parameter, -(-starts[-1] // (align * ranks)) * align * ranks
        flat = torch.zeros(size, dtype=first.dtype, device=first.device)
        wire_dtype = self._wire.wire_dtype(flat.dtype)
        wire_values = flat if wire_dtype == flat.dtype else torch.empty_like(flat, dtype=wire_dtype)
        bucket = Bucket(name=name, parts=parts, flat=flat, wire_values=wire_values)
        for part, start in zip(parts, starts, strict=False):
            template = torch.empty_like(part.parameter, device="meta")  # dense, in the parameter's memory format
            part.view = flat.as_strided(template.size(), template.stride(), start)
            part.bucket = bucket
        return bucket


def _move_gradients(parts: Sequence[BucketSlot]) -> None:
    """Move each part's gradient into its bucket: copy a fresh one, write zeros if there is none."""
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


def _group_parts(parts: Iterable[BucketSlot], first_bytes: float, bucket_bytes: float) -> list[list[BucketSlot]]:
    """Group the parts in this order, separately by type and device; each group has at least one part."""
    groups: list[list[BucketSlot]] = []
    open_groups: dict[tuple[torch.dtype, torch.device], tuple[list[BucketSlot], float]] = {}  # with the remaining bytes
    for part in parts:
        kind = (part.parameter.dtype, part.parameter.device)
        current, bytes_left = open_groups.get(kind, ([], -1.0))
        if part.parameter.nbytes > bytes_left:
            current, bytes_left = [], bucket_bytes if groups else first_bytes
            groups.append(current)
        current.append(part)
        open_groups[kind] = (current, bytes_left - part.parameter.nbytes)
    return groups
