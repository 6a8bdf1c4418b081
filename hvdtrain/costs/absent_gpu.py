"""An absent GPU: torch in this process treats it as real, and its operations are counted instead of executed.

Autograd, autocast's lists for CUDA, GradScaler and fused optimizers are torch's own, and the step is the run's own.
"""

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import optimizer as optimizers
from torch.overrides import TorchFunctionMode
from torch.utils import _foreach_utils
from torch.utils._python_dispatch import TorchDispatchMode

from hvdtrain.costs.backward import Backward
from hvdtrain.costs.counts import Counts, is_view
from hvdtrain.costs.memory import Memory
from hvdtrain.costs.shapes import META, ShapeTensor, compute, map_values, tensors_in

_aten = torch.ops.aten
_IN_PINNED_MEMORY = (_aten._pin_memory.default, _aten.is_pinned.default)


class AbsentGpu(TorchDispatchMode):
    """Runs operators on ShapeTensors; operators of the host run normally."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.memory = Memory()
        self.counts = Counts()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False  # only a driver can pin memory
        on_gpu = list(tensors_in(args, kwargs))
        target = None if kwargs.get("device") is None else torch.device(kwargs["device"]).type
        if func in _IN_PINNED_MEMORY and not on_gpu:
            return args[0] if func is _aten._pin_memory.default else False
        if not on_gpu and target != "cuda":
            return func(*args, **kwargs)
        if func is _aten._local_scalar_dense.default:  # the host reads a flag to skip, or a count: 0
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is _aten.copy_.default and not isinstance(args[0], ShapeTensor):
            self.counts.add_copy(on_gpu[0])
            return args[0].zero_()
        if on_gpu and target in ("cpu", "meta"):
            return self._to_host(func, args, kwargs, target)
        return self._run(func, args, kwargs, on_gpu)

    def _to_host(self, func: Any, args: Any, kwargs: Any, target: str) -> Any:
        """Return the result of copying the GPU's tensors elsewhere: zeros on the host, or tensors on meta."""
        made = func(*map_values(_shape_only, args), **(map_values(_shape_only, kwargs) | {"device": META}))
        if target == "meta":
            return made
        if func is _aten._to_copy.default:
            self.counts.add_copy(args[0])
        return torch.zeros_like(made, device="cpu")

    def _run(self, func: Any, args: Any, kwargs: Any, on_gpu: list[ShapeTensor]) -> Any:
        written = _written(func, args, kwargs)
        returns = func._schema.returns
        if written and all(one.alias_info is not None and one.alias_info.is_write for one in returns):
            result: Any = None if not returns else written[0] if len(returns) == 1 else tuple(written)
            made: list[ShapeTensor] = []
        else:
            inner_args, inner_kwargs = map_values(_shape_only, (tuple(args), kwargs))
            is_new = not is_view(func)
            outputs = compute(func, inner_args, inner_kwargs) if is_new else func(*inner_args, **inner_kwargs)
            result = map_values(self._on_gpu, outputs)
            made = list(tensors_in(result))
        self.counts.add(func, args, kwargs, read=on_gpu, changed=list(tensors_in(written)), made=made)
        return result

    def _on_gpu(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tensor = ShapeTensor(value)
        self.memory.hold(tensor)
        return tensor

    def adopt(self, model: torch.nn.Module) -> None:
        """Move a model from meta or the host to the GPU, in its memory format; tied parameters stay tied."""
        moved: dict[int, Any] = {}
        for module in model.modules():
            for tensors in (module._parameters, module._buffers):
                for name, tensor in tensors.items():
                    if tensor is not None:
                        if id(tensor) not in moved:
                            moved[id(tensor)] = self._adopted(tensor)
                        tensors[name] = moved[id(tensor)]

    def _adopted(self, tensor: Tensor) -> Tensor:
        with torch.no_grad():
            placed: Tensor = self._on_gpu(torch.empty_like(tensor, device=META))
        if isinstance(tensor, torch.nn.Parameter):
            return torch.nn.Parameter(placed, tensor.requires_grad)
        return placed


class _WithoutDriver(TorchFunctionMode):
    """Replaces torch's requests to a driver: the architecture, to choose attention, and streams, for backward."""

    def __init__(self, backward: Backward, memory: Memory) -> None:
        super().__init__()
        self._backward, self._memory = backward, memory

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention and isinstance(args[0], ShapeTensor):
            return _attention(*args, **kwargs)
        if func is Tensor.backward and isinstance(args[0], ShapeTensor):
            self._memory.end_forward()
            with self:  # blocks may be recomputed
                return self._backward.run(args[0], next(iter(args[1:]), kwargs.get("gradient")))
        return func(*args, **kwargs)


def _attention(*args: Any, **kwargs: Any) -> Tensor:
    """Use flash attention for half types without a mask, else memory-efficient or, if neither fits, plain attention."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    query, key, value = (given[name] for name in names[:3])
    mask: Tensor | None = given.get("attn_mask")
    rest = {name: given[name] for name in ("dropout_p", "is_causal", "scale") if name in given}
    if torch.is_autocast_enabled("cuda"):
        half = torch.get_autocast_dtype("cuda")
        query, key, value = (tensor.to(half) for tensor in (query, key, value))
    output: Tensor
    if query.dim() != 4 or given.get("enable_gqa"):
        more = {"enable_gqa": True} if given.get("enable_gqa") else {}
        output = _aten._scaled_dot_product_attention_math(query, key, value, mask, **rest, **more)[0]
    elif mask is None and query.dtype in (torch.float16, torch.bfloat16):
        output = _aten._scaled_dot_product_flash_attention(query, key, value, **rest)[0]
    else:
        bias = None if mask is None else _bias(mask, query.dtype).expand(*query.shape[:3], key.shape[2])
        needs_sums = torch.is_grad_enabled()
        output = _aten._scaled_dot_product_efficient_attention(query, key, value, bias, needs_sums, **rest)[0]
    return output


def _bias(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bias that attention adds to its scores for a mask."""
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(mask.logical_not(), -math.inf)


class _Event:
    """Replaces torch.cuda.Event, without waiting."""

    def __init__(self, **_: Any) -> None:
        pass

    def record(self, stream: object = None) -> None:
        pass

    def synchronize(self) -> None:
        pass


# Answers to what torch requests from its driver before it runs on a GPU.
_ANSWERS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_bf16_supported": lambda including_emulation=True: True,  # noqa: ARG005
    "is_initialized": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "current_device": lambda: 0,
    "device_count": lambda: 1,
    "_lazy_init": lambda: None,
    "get_rng_state": lambda device=None: torch.get_rng_state(),  # noqa: ARG005
    "set_rng_state": lambda state, device=None: None,  # noqa: ARG005
    "Event": _Event,
}


@contextmanager
def absent_gpu() -> Iterator[AbsentGpu]:
    """Provide an absent GPU, `cuda:0`, to torch. The process must not see any other GPU."""
    torch._C._ensureCUDADeviceGuardSet()  # without a visible GPU, a guard that does nothing
    backward = Backward()
    with ExitStack() as stack:
        for name, answer in _ANSWERS.items():
            stack.callback(setattr, torch.cuda, name, getattr(torch.cuda, name))
            setattr(torch.cuda, name, answer)
        of_lists: tuple[list[Any], ...] = (
            optimizers._foreach_supported_types,
            _foreach_utils._foreach_supported_types,
        )
        for kinds in of_lists:
            kinds.append(ShapeTensor)
            stack.callback(kinds.remove, ShapeTensor)
        stack.callback(torch._C._set_only_lift_cpu_tensors, torch._C._only_lift_cpu_tensors())
        torch._C._set_only_lift_cpu_tensors(True)  # torch.tensor(list, device=...) becomes a visible copy
        gpu = stack.enter_context(AbsentGpu())
        stack.enter_context(backward.saving())
        stack.enter_context(_WithoutDriver(backward, gpu.memory))
        yield gpu


def _shape_only(value: Any) -> Any:
    if isinstance(value, ShapeTensor):
        return value.shape_only
    if isinstance(value, torch.device):
        return META if value.type == "cuda" else value
    return value.to(META) if isinstance(value, Tensor) else value


def _written(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Return the arguments that an operator changes."""
    written = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value = args[place] if place < len(args) else kwargs.get(argument.name)
            if value is not None:
                written.append(value)
    return written
