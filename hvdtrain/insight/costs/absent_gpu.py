"""An absent GPU: torch in this process treats it as real, and its operations are counted instead of executed.

Its tensors are torch's fake ones. Autograd's formulas, autocast's lists for CUDA, GradScaler and fused optimizers are
torch's own, and the step is the run's own.
"""

import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.insight.costs.backward import Backward
from hvdtrain.insight.costs.counts import Operation, changed_by, count, tensors_in

# Minimum size and granularity of allocations (kMinBlockSize of torch's CUDACachingAllocator).
BLOCK_BYTES = 512


class Memory:
    """Counts the storages of tensors, rounded like the caching allocator's blocks; fragmentation is not modelled."""

    def __init__(self) -> None:
        self.live_bytes = self.peak_bytes = self.forward_bytes = 0
        self._storages: set[int] = set()

    def hold(self, tensor: Tensor) -> None:
        """Count the tensor's storage, unless already counted, until its last tensor is deleted."""
        storage = tensor.untyped_storage()
        key, held_bytes = storage._cdata, -(-storage.nbytes() // BLOCK_BYTES) * BLOCK_BYTES
        if key not in self._storages:
            self._storages.add(key)
            self.live_bytes += held_bytes
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._release, key, held_bytes).atexit = False

    def _release(self, key: int, held_bytes: int) -> None:
        self._storages.discard(key)
        self.live_bytes -= held_bytes

    def restart(self) -> None:
        """Reset the peaks."""
        self.peak_bytes, self.forward_bytes = self.live_bytes, 0


def size_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total size of the tensors' elements."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


GPU = torch.device("cuda", 0)

_aten = torch.ops.aten


class AbsentGpu(TorchDispatchMode):
    """Counts operators on fake tensors; operators of the host run normally."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = Memory()
        self.operations: list[Operation] = []
        self._fake = FakeTensorMode(allow_fallback_kernels=False, allow_non_fake_inputs=True)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:
            return args[0].device
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # only a driver can pin memory
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        read = [tensor for tensor in tensors_in(args, kwargs) if isinstance(tensor, FakeTensor)]
        if target != "cuda" and not read:
            return self._on_host(func, args, kwargs)
        if func is _aten._local_scalar_dense.default:  # the host reads a flag to skip, or a count: 0
            return torch.zeros((), dtype=args[0].dtype).item()
        result: Any
        changed, returns = changed_by(func, args, kwargs), func._schema.returns
        if changed and all(one.alias_info is not None and one.alias_info.is_write for one in returns):
            made, result = [], (changed[0] if len(returns) == 1 else tuple(changed)) if returns else None
            for tensor in changed:
                if not isinstance(tensor, FakeTensor):  # a copy to the host
                    tensor.zero_()
        else:
            with self._fake:
                result = func(*args, **kwargs)
            made = list(tensors_in(result))
        self.operations += count(func, args, kwargs, read=read, changed=changed, made=made)
        if target == "cpu":
            return torch.zeros(result.shape, dtype=result.dtype)
        for tensor in made:
            self.memory.hold(tensor)
        return result

    def _on_host(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is _aten.is_pinned.default:
            return False
        return args[0] if func is _aten._pin_memory.default else func(*args, **kwargs)

    def adopt(self, model: torch.nn.Module) -> None:
        """Move a model from meta or the host to the GPU, in its memory format; tied parameters stay tied."""
        moved: dict[Tensor, Any] = {tensor: _like(tensor) for tensor in (*model.parameters(), *model.buffers())}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                tensors.update({name: moved[tensor] for name, tensor in tensors.items() if tensor is not None})


def _like(tensor: Tensor) -> Tensor:
    placed = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=GPU)
    return torch.nn.Parameter(placed, tensor.requires_grad) if isinstance(tensor, torch.nn.Parameter) else placed


class _WithoutDriver(TorchFunctionMode):
    """Replaces torch's requests to a driver: the architecture, to choose attention, and streams, for backward."""

    def __init__(self, backward: Backward, memory: Memory) -> None:
        super().__init__()
        self._backward, self._memory = backward, memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and isinstance(args[0], FakeTensor):
            return _attention(*args, **kwargs)
        if func is Tensor.backward and isinstance(args[0], FakeTensor):
            self._memory.forward_bytes = max(self._memory.forward_bytes, self._memory.live_bytes)  # saved tensors, too
            with self:  # blocks may be recomputed
                return self._backward.run(args[0], next(iter(args[1:]), kwargs.get("gradient")))
        return func(*args, **kwargs)


def _attention(  # noqa: PLR0917 (torch's signature)
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Use memory-efficient attention, whose operators cost as much as flash attention's, or else plain attention."""
    rest: dict[str, Any] = {"dropout_p": dropout_p, "is_causal": is_causal, "scale": scale}
    if query.dim() != 4 or enable_gqa:
        return F.scaled_dot_product_attention(query, key, value, attn_mask, enable_gqa=enable_gqa, **rest)
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(half) for tensor in (query, key, value))
    bias = None if attn_mask is None else attn_mask.to(query.dtype).expand(*query.shape[:3], key.shape[2])
    needs_sums = torch.is_grad_enabled()
    output: Tensor = _aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs_sums, **rest)[0]
    return output


def _ignore(*_: Any, **__: Any) -> None:
    pass


# Answers to what torch requests from its driver before it runs on a GPU.
_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,  # noqa: ARG005
    "is_initialized": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "_lazy_init": _ignore,
    "get_rng_state": lambda device=None: torch.get_rng_state(),  # noqa: ARG005
    "set_rng_state": _ignore,
    "Event": lambda **_: SimpleNamespace(record=_ignore, synchronize=_ignore),
}


@contextmanager
def absent_gpu() -> Iterator[AbsentGpu]:
    """Provide an absent GPU, `cuda:0`, to torch. The process must not see any other GPU."""
    gpu, backward = AbsentGpu(), Backward()
    with ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # torch's own, to copy a model
        torch._C._ensureCUDADeviceGuardSet()  # without a visible GPU, a guard that does nothing
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device=...) becomes a visible copy
        stack.enter_context(patch.multiple(torch.cuda, **_ANSWERS))
        stream = SimpleNamespace(is_capturing=lambda: False)  # what optimizers of torch 2.14 ask
        stack.enter_context(patch.object(torch.accelerator, "current_stream", lambda: stream))
        stack.enter_context(patch.object(FakeTensorMode, "avoid_device_init", new=True, create=True))
        stack.enter_context(patch("torch._subclasses.fake_tensor.init_gpu_context", _ignore))
        for module in (optimizers, _foreach_utils):
            kinds = [*module._foreach_supported_types, FakeTensor]
            stack.enter_context(patch.object(module, "_foreach_supported_types", kinds))
        stack.enter_context(gpu)
        stack.enter_context(backward)
        stack.enter_context(_WithoutDriver(backward, gpu.memory))
        yield gpu
