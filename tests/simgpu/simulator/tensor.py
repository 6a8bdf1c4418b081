"""A tensor on cuda:0 whose numbers lie in the host's memory."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from tests.simgpu.simulator.gpu import Gpu

CUDA = torch.device("cuda", 0)


class SimTensor(Tensor):
    """A wrapper: autograd, autocast and the project see cuda:0; `inner` on the host has the numbers."""

    inner: Tensor
    gpu: "Gpu"
    storage: int  # the identity of the memory, also of tensors that share it

    @staticmethod
    def __new__(cls, inner: Tensor, gpu: "Gpu") -> "SimTensor":
        made: SimTensor = Tensor._make_wrapper_subclass(
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=CUDA,
        )
        made.gpu = gpu
        made.hold(inner)
        return made

    def hold(self, inner: Tensor) -> None:
        """Have these numbers."""
        self.inner = inner
        self.storage = self.gpu.memory.allocate(inner)

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{func} was called where no simulated GPU is")

    def __repr__(self) -> str:
        return f"SimTensor({tuple(self.shape)}, {self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            with torch.no_grad():
                copied: Any = self.detach().clone(memory_format=torch.preserve_format)
            is_parameter = getattr(self, "_is_param", False)
            copied = torch.nn.Parameter(copied) if is_parameter else copied
            memo[id(self)] = copied.requires_grad_(self.requires_grad)
        return memo[id(self)]

    def record_stream(self, _: Any) -> None:
        """Memory is not given out again."""

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, **_: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first.")

    def pin_memory(self, device: Any = None) -> Tensor:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")

    def __reduce_ex__(self, protocol: Any) -> Any:  # torch.save copies a storage while the host waits
        return self.detach().cpu().__reduce_ex__(protocol)
