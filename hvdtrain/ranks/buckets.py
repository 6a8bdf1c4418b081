"""Gradients summed over ranks in flat buckets, each sent when its last gradient is there."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.ranks.wire import Wire

RankZeros = Callable[[list[str]], list[str]]  # what rank 0 says
BeginSum = Callable[[Tensor, str], Callable[[], Any]]  # in place, under a name; what it returns waits for the sum


@dataclass(eq=False, slots=True, kw_only=True)
class _Bucket:
    """Gradients that travel together."""

    name: str
    parts: "list[_Part]"
    flat: Tensor  # of all elements: the parts' gradients one after the other
    sent: Tensor  # what is summed: the same, or its copy in another type
    missing: int = 0  # parts whose gradient is not complete yet
    wait: Callable[[], Any] | None = None  # for the sum, once it has begun


@dataclass(eq=False, slots=True, kw_only=True)
class _Part:
    """A parameter and its gradient's place."""

    name: str
    parameter: nn.Parameter
    passes_left: int = 1  # backward passes that are to come
    bucket: _Bucket | None = None  # until the order is known
    place: Tensor | None = None  # in the bucket, with the parameter's shape and strides


class BucketSync:
    """Gradients as views of flat buckets, which need no other buffer to be summed.

    The first step finds out in which order gradients come, and sends them at its end; rank 0's order is everybody's.
    From then on a bucket is sent when its last gradient is complete. Its parts keep the memory format of their
    parameters. Of a fresh gradient, which autograd makes after zero_grad(set_to_none=True), the bucket takes a copy.
    """

    overlap = True

    def __init__(
        self,
        model: nn.Module,
        *,
        wire: Wire,
        bucket_mb: float,
        rank_zeros: RankZeros,
        begin_sum: BeginSum,
    ) -> None:
        """`bucket_mb` in MiB; 0 sends each gradient alone."""
        self._wire = wire
        self._bucket_bytes = bucket_mb * 2**20
        self._rank_zeros, self._begin_sum = rank_zeros, begin_sum
        self._parts: list[_Part] = []
        self._new: dict[str, _Part] = {}  # without a bucket, by name
        self._came: dict[str, None] = {}  # their names, as their gradients have come
        self._buckets: list[_Bucket] = []
        self.include(model.named_parameters())

    def include(self, named: Iterable[tuple[str, nn.Parameter]]) -> None:
        for name, parameter in named:
            if parameter.requires_grad:
                part = _Part(name=name, parameter=parameter)
                self._parts.append(part)
                self._new[name] = part
                parameter.register_post_accumulate_grad_hook(partial(self._complete, part))

    def expect(self, backward_passes: int) -> None:
        for part in self._parts:
            part.passes_left = backward_passes
        for bucket in self._buckets:
            assert bucket.wait is None, f"{bucket.name} was sent in a step that did not finish"
            bucket.missing = len(bucket.parts)

    def _complete(self, part: _Part, _: Tensor) -> None:
        """A backward pass has given the part its gradient, or added to it."""
        part.passes_left -= 1
        assert part.passes_left >= 0, f"more backward passes through {part.name} than were expected"
        if part.bucket is None:
            self._came[part.name] = None
        elif part.passes_left > 0:
            _take_in([part])  # the next passes add to it where it lies
        else:
            part.bucket.missing -= 1
            if part.bucket.missing == 0 and self.overlap:
                self._send(part.bucket)

    def _send(self, bucket: _Bucket) -> None:
        _take_in(bucket.parts)
        self._wire.pack(bucket.flat, bucket.sent)
        bucket.wait = self._begin_sum(bucket.sent, bucket.name)

    def finish(self) -> None:
        if self._new:
            self._fill_buckets()
        for bucket in self._buckets:
            if bucket.wait is None:  # a part of it has had fewer passes, or no gradient at all
                self._send(bucket)
        for bucket in self._buckets:
            assert bucket.wait is not None
            bucket.wait()
            bucket.wait = None
            self._wire.unpack(bucket.sent, bucket.flat)

    def _fill_buckets(self) -> None:
        """Give the new parts their places. All ranks do this in the same step: that of their first gradients."""
        rest = [name for name in reversed(self._new) if name not in self._came]  # as backward would be likely to
        order = [self._new[name] for name in self._rank_zeros([*self._came, *rest])]
        for parts in _cut(order, self._bucket_bytes):
            self._buckets.append(_bucket(f"gradients.{len(self._buckets)}", parts, self._wire))
        self._new.clear()
        self._came.clear()

    def begin_anew(self, ranks: int) -> None:
        """Forget the sums of a step that was not finished, and the buckets: so many ranks agree on new ones."""
        for part in self._parts:
            part.bucket = part.place = part.parameter.grad = None
            self._new[part.name] = part
        self._buckets.clear()
        self._came.clear()
        self._wire.resize(ranks)

    def update(self, *, overflowed: bool) -> None:
        self._wire.update(overflowed=overflowed)

    def state_dict(self) -> dict[str, Any]:
        return self._wire.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._wire.load_state_dict(state)


def _take_in(parts: Sequence[_Part]) -> None:
    """Let each part's gradient lie in its place: a copy of a fresh one, zeros where there is none."""
    places, fresh = [], []
    for part in parts:
        assert part.place is not None
        gradient = part.parameter.grad
        if gradient is part.place:
            continue
        if gradient is None:
            part.place.zero_()
        else:
            places.append(part.place)
            fresh.append(gradient)
        part.parameter.grad = part.place
    if fresh:
        torch._foreach_copy_(places, fresh)


def _cut(parts: Iterable[_Part], bucket_bytes: float) -> list[list[_Part]]:
    """In this order, but each type and device for itself: as many together as fit, and at least one."""
    cut: list[list[_Part]] = []
    open_: dict[tuple[torch.dtype, torch.device], tuple[list[_Part], float]] = {}  # with the bytes that are left
    for part in parts:
        kind = (part.parameter.dtype, part.parameter.device)
        own, left = open_.get(kind, ([], -1.0))
        if part.parameter.nbytes > left:
            own, left = [], bucket_bytes
            cut.append(own)
        own.append(part)
        open_[kind] = (own, left - part.parameter.nbytes)
    return cut


def _bucket(name: str, parts: list[_Part], wire: Wire) -> _Bucket:
    flat = torch.empty(
        sum(part.parameter.numel() for part in parts), dtype=parts[0].parameter.dtype, device=parts[0].parameter.device
    )
    travels = wire.sent_as(flat.dtype)
    sent = flat if travels == flat.dtype else torch.empty_like(flat, dtype=travels)
    bucket = _Bucket(name=name, parts=parts, flat=flat, sent=sent)
    start = 0
    for part in parts:
        like = torch.empty_like(part.parameter, device="meta")  # dense, in the parameter's memory format
        part.place = flat.as_strided(like.size(), like.stride(), start)
        part.bucket = bucket
        start += like.numel()
    return bucket
