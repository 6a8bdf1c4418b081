"""EfficientNet's convolutions: torch's, with equal names and faster kernels on CPUs."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.grad import conv2d_input


def convert(model: nn.Module) -> None:
    """Replace every convolution inside `model`; its state stays."""
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Convolution


class Convolution(nn.Conv2d):
    """nn.Conv2d, on CPUs with other kernels where oneDNN's are slow: docs/explanation/benchmarks.md has the times."""

    def forward(self, images: Tensor) -> Tensor:  # (N, C, H, W)
        """Convolve; on a CPU, a convolution of single pixels is a matrix product over the channels."""
        if images.device.type != "cpu" or torch.compiler.is_compiling() or not len(images):
            return super().forward(images)
        pixels = images.permute(0, 2, 3, 1)  # (N, H, W, C)
        is_pointwise = self.kernel_size == self.stride == (1, 1) and self.groups == 1 and self.padding == (0, 0)
        if is_pointwise and pixels.is_contiguous():
            return F.linear(pixels, self.weight.flatten(1), self.bias).permute(0, 3, 1, 2)
        if self._is_slow(images):
            convolved: Tensor = _Depthwise.apply(images, self.weight, self.stride, self.padding)  # type: ignore[no-untyped-call]
            return convolved
        return super().forward(images)

    def _is_slow(self, images: Tensor) -> bool:
        """Return whether oneDNN computes the gradient of a depthwise weight as if each group had 16 channels."""
        if not (1 < self.groups == self.in_channels == self.out_channels) or self.bias is not None:
            return False
        is_plain = images.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        kernel, smallest = max(self.kernel_size), min(images.shape[2:]) // max(self.stride)
        return is_plain and self.dilation == (1, 1) and (kernel > 3 or smallest < kernel)


class _Depthwise(torch.autograd.Function):
    """A depthwise convolution whose weights' gradient is a depthwise convolution too: of each image by its gradient."""

    @staticmethod
    def forward(ctx: Any, images: Tensor, weight: Tensor, stride: tuple[int, int], padding: tuple[int, int]) -> Tensor:
        ctx.save_for_backward(images, weight)
        ctx.stride, ctx.padding = stride, padding
        return F.conv2d(images, weight, None, stride, padding, groups=len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_output: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        images, weight = ctx.saved_tensors
        batch, channels, height, width = images.shape
        rows, columns = weight.shape[2:]
        of_images = None
        if ctx.needs_input_grad[0]:
            of_images = conv2d_input(images.shape, weight, of_output, ctx.stride, ctx.padding, groups=channels)
        planes = images.permute(2, 3, 0, 1).reshape(1, height, width, batch * channels).permute(0, 3, 1, 2)
        kernels = of_output.reshape(batch * channels, 1, *of_output.shape[2:])
        # Rows and columns that the stride left over come last.
        of_weight = F.conv2d(planes, kernels, None, 1, ctx.padding, dilation=ctx.stride, groups=batch * channels)
        of_weight = of_weight[..., :rows, :columns].reshape(batch, channels, 1, rows, columns).sum(0)
        return of_images, of_weight, None, None
