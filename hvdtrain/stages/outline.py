"""A model without values; each rank creates only its part of it, with the same bits as in the whole model."""

import hashlib
import random
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput

_aten = torch.ops.aten
# Their first argument is a size.
_FACTORIES = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.zeros.default, _aten.ones.default}
_META = torch.device("meta")

Make = Callable[[], nn.Module]


class Outline:
    """A model's structure, its tensors on meta, and the function that makes the model.

    The whole model uses one stream of random numbers. A rank therefore calls the function again, with tensors that it
    does not keep on meta: their random numbers are drawn into a temporary tensor of the same shape, since torch fills
    small and large tensors in different ways, and discarded.
    """

    def __init__(self, make: Make) -> None:
        """Create the outline; `make` seeds torch's random numbers. Raises the error of `make` if it reads values."""
        self._make = make
        with _kept_random_state(), _Making() as making:
            self.model = make()
        self._operations = making.operations
        storages = {name: tensor.untyped_storage()._cdata for name, tensor in _tensors(self.model)}
        self._made_at = {name: making.made_at[one] for name, one in storages.items() if one in making.made_at}

    def fill_on_all(self, comm: Comm, model: nn.Module) -> None:
        """Complete `model`, the part of the outline that a rank has kept, with values; a collective.

        If a rank cannot do so, each rank makes the whole model.
        """
        kept = {name for name, _ in _tensors(model)}
        part = agree(comm, lambda: self._part(kept))
        drawn = None if part is None else hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()
        of_ranks = comm.allgather(drawn)
        if part is None or set(of_ranks) != {drawn}:
            part = self._make()
        vars(model).update(vars(part))

    def _part(self, kept: Collection[str]) -> nn.Module | None:
        """Return the model with values for these parameters and buffers; None if it was built in a different way."""
        needed = {number for name, number in self._made_at.items() if name in kept}
        try:
            with _Making(left_out={*self._made_at.values()} - needed) as making:
                part = self._make()
        except Exception as error:
            if isinstance(error, BadInput):
                raise
            return None
        has_values = not any(tensor.is_meta for name, tensor in _tensors(part) if name in kept)
        return part if has_values and making.operations == self._operations else None


def outline_on_all(comm: Comm, make: Make) -> Outline | None:
    """Return the outline of the model that `make` makes; None if `make` reads values on a rank, such as by .item()."""

    def attempt() -> Outline | None:
        try:
            return Outline(make)
        except Exception as error:
            if isinstance(error, BadInput):
                raise
            return None

    outline = agree(comm, attempt)
    return outline if all(comm.allgather(outline is not None)) else None


class _Making(TorchDispatchMode):
    """Numbers the operations that make a model, and leaves the results of some of them on meta."""

    def __init__(self, left_out: Collection[int] | None = None) -> None:
        """Set the numbers of the operations to leave out; by default, all that make random tensors or no values."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[str] = []
        self.made_at: dict[int, int] = {}  # id of a storage -> number of the operation that created it
        self._left_out = left_out
        self._storages: list[torch.UntypedStorage] = []  # kept alive, so that their ids are not reused
        self._warnings = warnings.catch_warnings()

    def __enter__(self) -> "_Making":
        self._warnings.__enter__()
        warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # weights of other ranks
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._warnings.__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        number, kwargs = len(self.operations), kwargs or {}
        self.operations.append(str(func))
        is_random, is_factory = torch.Tag.nondeterministic_seeded in func.tags, func in _FACTORIES and 0 not in args[0]
        leave_out = is_random or is_factory if self._left_out is None else number in self._left_out
        if leave_out and is_factory:
            made = func(*args, **{**kwargs, "device": _META})
        elif is_random and self._left_out is not None:
            made = func(*tree_map_only(Tensor, _with_memory, args), **kwargs)
        else:
            made = func(*_together(func, args), **kwargs)
        if is_random and func._schema.is_mutable:
            return args[0]
        if leave_out:
            made = tree_map_only(Tensor, _to_meta, made)
        for tensor in _tensors_in(made):
            storage = tensor.untyped_storage()
            self.made_at.setdefault(storage._cdata, number)
            self._storages.append(storage)
        return made


def _together(func: Any, args: Any) -> Any:
    """Move all arguments to meta if one is; a tensor with values is never changed by one without."""
    on_meta = [tensor.is_meta for tensor in _tensors_in(args)]
    if any(on_meta) and not all(on_meta) and (on_meta[0] or not func._schema.is_mutable):
        return tree_map_only(Tensor, _to_meta, args)
    return args


def _tensors_in(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _to_meta(tensor: Tensor) -> Tensor:
    return tensor.to(_META)


def _with_memory(tensor: Tensor) -> Tensor:
    """Return a tensor with memory in which random numbers can be drawn for this one."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype) if tensor.is_meta else tensor


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield all parameters and buffers, each under each of its names."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


@contextmanager
def _kept_random_state() -> Iterator[None]:
    """Restore the random state of Python and NumPy at the end."""
    drawn = random.getstate(), np.random.get_state()  # noqa: NPY002
    yield
    random.setstate(drawn[0])
    np.random.set_state(drawn[1])  # noqa: NPY002
