"""The state of a model: its parameters, its persistent buffers and its extra state, by name.

A forward pass may assign a new tensor to a buffer, set one that was None, or let one grow. The state is therefore
looked up at each use; nothing keeps a buffer's tensor from one use to the next.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode

from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.guard import is_out_of_memory


class ModelState(NamedTuple):
    """The state of a model by name; the tensors are the model's."""

    buffers: dict[str, Tensor]  # the persistent ones
    without_buffers: dict[str, Any]  # the parameters and the extra state
    extra: dict[str, Any]  # what modules save besides tensors: the results of their `get_extra_state`


def state_of(model: nn.Module) -> ModelState:
    """Return the state of the model as `state_dict` names it, several times as fast unless a module changes that."""
    modules = list[tuple[str, nn.Module]]()
    _add_modules(modules, "", model)
    buffers, without_buffers = dict[str, Tensor](), dict[str, Any]()
    if _is_plain([module for _, module in modules]):
        for start, module in modules:
            for name, parameter in module._parameters.items():
                if parameter is not None:
                    without_buffers[start + name] = parameter.detach()
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    buffers[start + name] = buffer
    else:
        state, held = model.state_dict(), dict(model.named_buffers(remove_duplicate=False))
        buffers = {name: buffer for name, buffer in held.items() if name in state}
        without_buffers = {name: value for name, value in state.items() if name not in held}
    extra = {name: value for name, value in without_buffers.items() if name.endswith("_extra_state")}
    return ModelState(buffers=buffers, without_buffers=without_buffers, extra=extra)


def _add_modules(found: list[tuple[str, nn.Module]], start: str, module: nn.Module) -> None:
    """Add all modules with the start of their tensors' names, in a third of the time of `named_modules`."""
    found.append((start, module))
    for name, below in module._modules.items():
        if below is not None:
            _add_modules(found, f"{start}{name}.", below)


def _is_plain(modules: Iterable[nn.Module]) -> bool:
    """Return whether `state_dict` has only what these modules register."""
    if any(one._state_dict_hooks or one._state_dict_pre_hooks or "state_dict" in vars(one) for one in modules):
        return False
    methods = "state_dict", "_save_to_state_dict", "get_extra_state"
    return all(getattr(kind, name) is getattr(nn.Module, name) for kind in set(map(type, modules)) for name in methods)


def set_extra_state(model: nn.Module, values: Mapping[str, Any]) -> None:
    """Call `set_extra_state` of the modules with these values."""
    if values:
        model.load_state_dict(values, strict=False)


@torch.no_grad()
def set_buffers(model: nn.Module, values: Mapping[str, Tensor | None]) -> None:
    """Copy values into the model's buffers; one that does not fit, or is new, gets a tensor of its own."""
    for name, value in values.items():
        parent, _, own_name = name.rpartition(".")
        module = model.get_submodule(parent)
        current: Tensor | None = getattr(module, own_name, None)
        if value is not None and current is not None and _fits(value, current):
            current.detach().copy_(value)
        elif value is not current:
            device = current.device if current is not None else next(model.parameters()).device
            new = None if value is None else value.detach().to(device, copy=True)
            is_persistent = own_name not in getattr(module, "_non_persistent_buffers_set", ())
            module.register_buffer(own_name, new, persistent=is_persistent)


def _fits(value: Tensor, current: Tensor) -> bool:
    is_alike = (value.shape, value.dtype, value.layout) == (current.shape, current.dtype, current.layout)
    return is_alike and (value.layout != torch.strided or 0 not in current.stride())  # an expanded one is not writable


class Places:
    """Some buffers of a model, looked up at each call by the modules that hold them."""

    def __init__(self, model: nn.Module, names: Iterable[str]) -> None:
        split = [name.rpartition(".") for name in names]
        self._places = [(model.get_submodule(parent)._buffers, own_name) for parent, _, own_name in split]

    def __call__(self) -> list[Tensor]:
        """Return the tensors that are the buffers now."""
        return [holder[name] for holder, name in self._places]  # type: ignore[misc]


@contextmanager
def unchanged(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Undo what the body changes in the state of these modules besides parameters: their tensors and their values."""
    before = [
        (module, {name: (buffer, _copy(buffer)) for name, buffer in module._buffers.items()}, _own_extra_state(module))
        for module in modules
    ]
    try:
        yield
    finally:
        for module, kept, extra in before:
            for name in module._buffers.keys() - kept.keys():
                delattr(module, name)
            for name, (buffer, value) in kept.items():
                if value is not None and buffer is not None and _fits(value, buffer):
                    buffer.detach().copy_(value)
                if value is not None or buffer is None:
                    module._buffers[name] = buffer
            if extra is not None:
                module.set_extra_state(extra)


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None or is_lazy(buffer) else buffer.detach().clone()


def _own_extra_state(module: nn.Module) -> Any:
    has_none = type(module).get_extra_state is nn.Module.get_extra_state
    return None if has_none else copy.deepcopy(module.get_extra_state())


class _WithoutGraph(TorchFunctionMode):
    """Copies tensors of a graph as values: weights that `weight_norm` computes, activations that modules keep."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.__deepcopy__ and not args[0].is_leaf:
            return args[0].detach().clone()
        return func(*args, **(kwargs or {}))


def copy_of(model: nn.Module, *, remedy: str) -> nn.Module:
    """Return a copy of the model; BadInput with this remedy if it holds something that cannot be copied."""
    try:
        with _WithoutGraph():
            return copy.deepcopy(model)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise BadInput(f"the model cannot be copied ({first_line(error)}). {remedy}") from error


def first_line(error: Exception) -> str:
    """Return the type and the first line of an error's text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]
