"""Optimizer states divided over ranks (ZeRO-1, Rajbhandari et al. 2020): each rank updates a shard of each bucket.

Parameters lie in flat buffers, like their gradients in buckets. Sums of buckets are scattered, the run's own optimizer
updates this rank's pieces of the parameters, and these are gathered. The moving average is divided in the same way.
"""

import copy
import math
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from hvdtrain.core.finite import not_finite
from hvdtrain.loop.draft import Draft
from hvdtrain.ranks.buckets import Bucket, BucketSlot, BucketSync
from hvdtrain.ranks.comm import HorovodComm
from hvdtrain.ranks.sync import State
from hvdtrain.ranks.wire import Wire, bits
from hvdtrain.recipe.average import MovingAverage
from hvdtrain.recipe.optim import Layerwise
from hvdtrain.settings.safety.exits import BadInput

# torch's optimizers that compute each element from that element alone.
ELEMENTWISE = ("SGD", "RMSprop", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta")
# Pieces begin at multiples of this number of elements of their parameter. An undivided update then computes the same
# elements in vectors; the remaining ones could be rounded differently.
ALIGN = 64
IN_FLIGHT = 4  # buckets of parameters that are gathered at the same time

Groups = list[list[nn.Parameter]]  # parameters by the optimizer's groups
Wholes = Mapping[nn.Parameter, Tensor]  # tensors that are laid out like the parameters


@dataclass(eq=False, slots=True, kw_only=True)
class _Piece:
    """The elements of a parameter that this rank updates."""

    whole: nn.Parameter
    elements: slice  # in the memory of the parameter
    gradient: Tensor  # of the elements, in the bucket

    def of(self, whole: Tensor) -> Tensor:
        """Return these elements of a tensor that is laid out like the parameter, as a view."""
        return whole.detach().as_strided((whole.numel(),), (1,))[self.elements].view(self.gradient.shape)

    def cut(self, value: Tensor) -> Tensor:
        """Return a copy of these elements of a tensor of the parameter's shape, or of a number."""
        if value.dim():
            laid_out = torch.empty_like(self.whole, dtype=value.dtype, device=value.device)
            value = self.of(laid_out.copy_(value))
        return value.clone()


@dataclass(eq=False, slots=True, kw_only=True)
class _Shard:
    """A bucket of which this rank has a part."""

    bucket: Bucket
    elements: slice  # this rank's part
    values: Tensor  # of the summed gradients in this part, or of anything else that the ranks gather
    parameters: Tensor  # laid out like the bucket
    pieces: list[_Piece]


class ShardedSync(BucketSync):
    """Sums gradients in buckets, in the reverse order of the model; each rank gets an equal part of each sum.

    If each gradient is sent alone, the sums are those of an undivided run, which fixes the order of their summands.
    """

    def __init__(self, model: nn.Module, comm: HorovodComm, wire: Wire, *, bucket_mb: float) -> None:
        super().__init__(model, comm, wire, bucket_mb=bucket_mb)
        self._ranks, self.shards, self._is_scattered = comm, comm.size, bucket_mb > 0
        self._shards: dict[str, _Shard] = {}  # by the name of the bucket

    def divide(self, draft: Draft) -> None:
        """Let the optimizer and the moving average keep only this rank's pieces, before the first step."""
        optimizer, part = draft.optimizer, draft.where.part
        self._tied = part.tied
        self._fill_buckets()
        shards = [*self._shards.values()]
        self._pieces = [piece for shard in shards for piece in shard.pieces]
        self._wholes = [one.parameter for shard in shards for one in shard.bucket.parts]
        self._own = {piece.whole: nn.Parameter(piece.of(piece.whole)) for piece in self._pieces}
        self._whole_groups: Groups = [list(group["params"]) for group in optimizer.param_groups]
        # An element of each group that stays 0, so that no rank has an empty group and misses a sum of norms.
        self._spares = [nn.Parameter(self._wholes[0].new_zeros(1, 1)) for _ in self._whole_groups]
        self._own_groups = self._groups_of(self._pieces)
        self._turns = [([shard], self._groups_of(shard.pieces)) for shard in shards]
        if isinstance(optimizer, Layerwise):
            self._turns = [(shards, self._own_groups)]
            optimizer.whole_norms = self._whole_norms
        held = {whole: optimizer.state[whole] for whole in self._wholes}
        optimizer.state = defaultdict(dict, {own: state for own, state in self.split(held).items() if state})
        _set_groups(optimizer, self._own_groups)
        if part.counted_before:
            twice = (id(own) for whole, own in self._own.items() if id(whole) in part.counted_before)
            part.counted_before = {*part.counted_before, *twice}
        self._average = draft.average if isinstance(draft.average, MovingAverage) else None
        if self._average is not None:
            self._average.divide(self)

    def _groups_of(self, pieces: Iterable[_Piece]) -> Groups:
        own = {piece.whole: self._own[piece.whole] for piece in pieces}
        groups = zip(self._whole_groups, self._spares, strict=True)
        return [[*(own[whole] for whole in group if whole in own), spare] for group, spare in groups]

    def _group(self, order: Iterable[BucketSlot]) -> list[list[BucketSlot]]:
        """Put tied parameters into buckets of their own, so that all stages that hold them divide them alike."""
        order = list(order)
        alone = [[part] for part in order if part.name in self._tied]
        return [*super()._group(part for part in order if part.name not in self._tied), *alone]

    def _make_bucket(self, name: str, parts: list[BucketSlot], *, align: int = ALIGN, ranks: int = 1) -> Bucket:
        if not parts[0].name:  # it is carried, and no part of the model
            return super()._make_bucket(name, parts)
        bucket = super()._make_bucket(name, parts, align=align, ranks=self.shards)
        size = len(bucket.flat) // self.shards
        first = size * self._ranks.rank
        own, parameters = slice(first, first + size), torch.zeros_like(bucket.flat)
        shard = _Shard(bucket=bucket, elements=own, values=bucket.flat[own], parameters=parameters, pieces=[])
        for part in parts:
            assert part.view is not None
            whole, start = part.parameter, part.view.storage_offset()
            whole.data = parameters.as_strided(part.view.size(), part.view.stride(), start).copy_(whole.detach())
            low, high = max(start, first), min(start + whole.numel(), first + size)
            if low < high:
                shape = {0: (), 1: (-1,)}.get(whole.dim(), (1, -1))  # LAMB distinguishes matrices and vectors
                gradient = bucket.flat[low:high].view(shape)
                shard.pieces.append(_Piece(whole=whole, elements=slice(low - start, high - start), gradient=gradient))
        self._shards[name] = shard
        return bucket

    def expect(self, backward_passes: int) -> None:
        super().expect(backward_passes)
        for whole in self._wholes:
            whole.grad = None  # the optimizer has only pieces

    def _begin(self, bucket: Bucket) -> Callable[[], Any]:
        shard = self._shards.get(bucket.name)
        if shard is None:
            return super()._begin(bucket)
        if self._is_scattered:
            wait = self._ranks.begin_scattered_sum(bucket.wire_values, bucket.name)
            return lambda: self._wire.unpack(wait(), shard.values)
        wait = self._ranks.begin_sum(bucket.wire_values[: bucket.parts[0].parameter.numel()], bucket.name)

        def unpack_shard() -> None:
            wait()
            self._wire.unpack(bucket.wire_values[shard.elements], shard.values)

        return unpack_shard

    def finish(self) -> None:
        """Wait for this rank's part of the sums; if a part of any rank is not finite, all ranks get a NaN."""
        super().finish()
        for piece in self._pieces:
            self._own[piece.whole].grad = piece.gradient
        bad = max(self._ranks.allgather(not_finite([shard.values for shard in self._shards.values()]).item()))
        for spare in self._spares:
            spare.grad = torch.full_like(spare, math.nan if bad else 0.0)

    def whole_norm(self, norm: Tensor) -> Tensor:
        return norm.new_tensor(math.sqrt(math.fsum(one * one for one in self._ranks.allgather(norm.item()))))

    def _whole_norms(self, own: list[Tensor], norms: Tensor) -> Tensor:
        numbers = {id(self._own.get(whole)): number for number, whole in enumerate(self._wholes)}
        places = torch.tensor([numbers.get(id(one), len(self._wholes)) for one in own], device=norms.device)
        squares = torch.zeros(len(self._wholes) + 1, dtype=torch.float64, device=norms.device)  # the last of spares
        squares[places] = norms.double().square()
        return self._ranks.allreduce(squares, "norms")[places].sqrt().to(norms.dtype)

    def update(self, optimizer: torch.optim.Optimizer) -> None:
        """Update this rank's pieces and gather those of all ranks; the first are gathered while others are updated."""
        gathers = deque[Callable[[], None]]()
        for shards, groups in self._turns:
            _set_groups(optimizer, groups)
            optimizer.step()
            for shard in shards:
                if len(gathers) == IN_FLIGHT:
                    gathers.popleft()()
                gathers.append(self._begin_parameters(shard))
        _set_groups(optimizer, self._own_groups)
        for end in gathers:
            end()

    def _begin_parameters(self, shard: _Shard) -> Callable[[], None]:
        parameters, own = shard.parameters, shard.elements
        wait = self._ranks.begin_gather(bits(parameters[own]), f"parameters of {shard.bucket.name}")

        def end() -> None:
            gathered = wait().view(parameters.dtype)
            parameters[: own.start], parameters[own.stop :] = gathered[: own.start], gathered[own.stop :]

        return end

    def _gather(self, shard: _Shard, own: Wholes) -> Wholes:
        """Gather a shard's pieces of all ranks; return whole tensors. This overwrites gradients."""
        for piece in shard.pieces:
            piece.gradient.copy_(own[piece.whole])
        flat = self._ranks.begin_gather(bits(shard.values), f"pieces of {shard.bucket.name}")().view(shard.values.dtype)
        wholes = [part.parameter for part in shard.bucket.parts]
        return {one: flat.as_strided(one.size(), one.stride(), one.storage_offset()) for one in wholes}

    def pieces_of(self, whole: Wholes) -> dict[nn.Parameter, Tensor]:
        """Return this rank's pieces of tensors that are laid out like the parameters, as views."""
        return {piece.whole: piece.of(whole[piece.whole]) for piece in self._pieces}

    def gather_(self, pieces: Wholes, whole: Wholes) -> None:
        """Copy the pieces of all ranks into whole tensors; a collective."""
        for shard in self._shards.values():
            for parameter, gathered in self._gather(shard, pieces).items():
                whole[parameter].detach().copy_(gathered)

    def split(self, held: Mapping[nn.Parameter, State]) -> Mapping[nn.Parameter, State]:
        own: dict[nn.Parameter, State] = {}
        for piece in self._pieces:
            own[self._own[piece.whole]] = {name: piece.cut(one) for name, one in held.get(piece.whole, {}).items()}
        template = next((state for whole, state in held.items() if whole.dim() and state), {})
        for spare in self._spares:
            own[spare] = {name: torch.zeros_like(spare) if one.dim() else one.clone() for name, one in template.items()}
        return own

    def whole(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Return an optimizer with whole parameters, and on the first rank with their state, on the host."""
        if self._average is not None:
            self._average.gather()
        numbers = {
            number: {name: value.item() for name, value in optimizer.state[self._own[one]].items() if not value.dim()}
            for number, one in enumerate(self._wholes)
            if one in self._own and optimizer.state[self._own[one]]
        }
        known = {self._wholes[int(one)]: of for each in self._ranks.allgather(numbers) for one, of in each.items()}
        held: dict[nn.Parameter, State] = {whole: {} for whole in known}
        names = {name: value for spare in self._spares for name, value in optimizer.state[spare].items()}
        for name, value in names.items():
            gathered = self._gather_state(optimizer, name) if value.dim() else {}
            for whole, of in known.items():
                held[whole][name] = torch.tensor(of[name], dtype=value.dtype) if name in of else gathered.get(whole)
        twin = copy.copy(optimizer)
        twin.state = defaultdict(dict, {one: held[one] for group in self._whole_groups for one in group if one in held})
        twin.param_groups = [dict(group) for group in optimizer.param_groups]
        _set_groups(twin, self._whole_groups)
        return twin

    def _gather_state(self, optimizer: torch.optim.Optimizer, name: str) -> Wholes:
        """Return a tensor of the optimizer's state for each whole parameter, on the first rank; a collective."""
        gathered, state = dict[nn.Parameter, Tensor](), optimizer.state
        for shard in self._shards.values():
            own = {one.whole: state[self._own[one.whole]].get(name, one.gradient) for one in shard.pieces}
            wholes = self._gather(shard, own)
            if self._ranks.rank == 0:
                gathered |= {one: torch.empty_like(one, device="cpu").copy_(value) for one, value in wholes.items()}
        return gathered


def require_elementwise(optimizer: torch.optim.Optimizer, option: str) -> None:
    """Raise BadInput for a program's own optimizer whose state may be no tensor of each element, as `option` needs."""
    if type(optimizer) not in [getattr(torch.optim, name) for name in ELEMENTWISE]:
        raise BadInput(
            f"{option}: the program's own {type(optimizer).__name__} may keep other state than torch's. Leave the "
            f"option out, or choose one of torch's {', '.join(ELEMENTWISE)}."
        )


def _set_groups(optimizer: torch.optim.Optimizer, groups: Groups) -> None:
    for group, parameters in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = parameters
