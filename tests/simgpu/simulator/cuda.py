"""What torch.cuda says in a process with one simulated GPU."""

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.cuda import _sanitizer
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.optim import optimizer
from torch.utils import _foreach_utils

from tests.simgpu.simulator.gpu import Gpu
from tests.simgpu.simulator.tensor import CUDA, SimTensor

TOTAL_BYTES = 80 * 2**30


@contextlib.contextmanager
def simulated() -> Iterator[Gpu]:
    """One GPU, until the end of the context; the process must have been started with the shim."""
    with pytest.MonkeyPatch.context() as patch:
        # The detector takes a stack at every kernel, which is slow, and a finding has one of its own.
        no_stack = types.SimpleNamespace(extract=lambda *_, **__: [])
        patch.setattr(_sanitizer, "traceback", types.SimpleNamespace(StackSummary=no_stack, walk_stack=id))
        gpu = Gpu()
        for name, value in _torch_cuda(gpu).items():
            patch.setattr(torch.cuda, name, value, raising=False)
        patch.setattr(torch.accelerator, "is_available", _always(True))
        patch.setattr(torch.accelerator, "current_accelerator", _always(CUDA))
        capturing = types.SimpleNamespace(is_capturing=_always(False))  # what torch 2.14's optimizers ask
        patch.setattr(torch.accelerator, "current_stream", _always(capturing))
        attention = _attention(functional.scaled_dot_product_attention)
        patch.setattr(functional, "scaled_dot_product_attention", attention)
        for name in ("tolist", "numpy"):
            patch.setattr(torch.Tensor, name, _read_by_host(gpu, getattr(torch.Tensor, name)))
        for module in (optimizer, _foreach_utils):
            patch.setattr(module, "_foreach_supported_types", [*module._foreach_supported_types, SimTensor])
        torch._C._ensureCUDADeviceGuardSet()
        with _wrapped_parameters(), _tensors_from_lists_are_copies(), gpu:
            yield gpu


def _torch_cuda(gpu: Gpu) -> dict[str, Any]:
    [default], generator = gpu.streams, torch.Generator()
    properties = types.SimpleNamespace(
        name="Simulated GPU",
        uuid="GPU-simulated",
        total_memory=TOTAL_BYTES,
        multi_processor_count=132,
        major=9,
        minor=0,
    )

    return {
        "_lazy_init": _always(None),
        "Event": gpu.new_event,
        "Stream": gpu.new_stream,
        "current_device": _always(0),
        "current_stream": lambda *_: gpu.stream,
        "default_stream": _always(default),
        "device_count": _always(1),
        "empty_cache": _always(None),
        "get_device_capability": _always((9, 0)),
        "get_device_name": _always(properties.name),
        "get_device_properties": _always(properties),
        "get_rng_state": lambda *_: generator.get_state(),
        "is_available": _always(True),
        "is_bf16_supported": _always(True),
        "is_current_stream_capturing": _always(False),
        "is_initialized": _always(True),
        "manual_seed_all": generator.manual_seed,
        "max_memory_allocated": _always(0),
        "max_memory_reserved": _always(0),
        "reset_peak_memory_stats": _always(None),
        "set_device": _always(None),
        "set_rng_state": lambda state, *_: generator.set_state(state),
        "stream": lambda stream: contextlib.nullcontext() if stream is None else stream,
        "synchronize": lambda *_: gpu.wait_for_all(),
    }


def _always(value: Any) -> Callable[..., Any]:
    return lambda *_, **__: value


def _attention(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of torch's kernels the one that is made of other operators: the others are in libraries that are not seen."""

    def attention(query: Any, *args: Any, **options: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH) if isinstance(query, SimTensor) else contextlib.nullcontext():
            return original(query, *args, **options)

    return attention


def _read_by_host(gpu: Gpu, original: Callable[..., Any]) -> Callable[..., Any]:
    """A method of tensors that reads the host's memory without an operator."""

    def read(self: torch.Tensor, *args: Any, **options: Any) -> Any:
        if not isinstance(self, SimTensor):
            gpu.memory.touch(self, is_written=False)
        return original(self, *args, **options)

    return read


@contextlib.contextmanager
def _wrapped_parameters() -> Iterator[None]:
    """Module.to makes new parameters: set_data would not change what a wrapper holds."""
    before = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(before)


@contextlib.contextmanager
def _tensors_from_lists_are_copies() -> Iterator[None]:
    """torch.tensor(values, device="cuda") is a copy from the host, which the simulated GPU sees."""
    before = torch._C._only_lift_cpu_tensors()
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        yield
    finally:
        torch._C._set_only_lift_cpu_tensors(before)
