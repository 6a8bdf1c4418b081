"""EfficientNet's layers: torch's and torchvision's, with equal names and other backward passes."""

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn
from torch.nn.grad import conv2d_input

PIXELS = (2, 3)


def convert(model: nn.Module) -> None:
    """Replace every convolution and every SqueezeExcitation of torchvision inside `model`; its state stays."""
    for module in model.modules():
        if type(module) is nn.Conv2d:
            module.__class__ = Convolution
        elif type(module) is torchvision.ops.SqueezeExcitation:
            module.__class__ = SqueezeExcitation


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
            convolved: Tensor = _Depthwise.apply(images, self.weight, self.stride, self.padding)
            return convolved
        return super().forward(images)

    def _is_slow(self, images: Tensor) -> bool:
        """Return whether oneDNN computes the gradient of a depthwise weight as if each group had 16 channels.

        It does with one output pixel, too, but is then faster than a convolution by kernels of that pixel.
        """
        if not (1 < self.groups == self.in_channels == self.out_channels) or self.bias is not None:
            return False
        is_plain = images.dtype == torch.float32 and not torch.is_autocast_enabled("cpu")
        kernel, stride, smallest = max(self.kernel_size), max(self.stride), min(images.shape[2:])
        is_slow = smallest > stride and (kernel > 3 or smallest < kernel + stride - 1)
        return is_plain and self.dilation == (1, 1) and is_slow


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


class SqueezeExcitation(torchvision.ops.SqueezeExcitation):  # type: ignore[misc]
    """torchvision's SqueezeExcitation, with equal outputs and names; the features' gradient is rounded once less.

    Autograd would write that gradient three times: through the product, through the mean, and the sum of both.
    """

    def forward(self, features: Tensor) -> Tensor:  # (N, C, H, W)
        """Multiply each channel by a scale computed from the means of all channels of the image."""
        features, means, channel = _Squeeze.apply(features)
        scale = self.scale_activation(self.fc2(self.activation(self.fc1(means))))
        scaled: Tensor = _Excite.apply(features, scale, channel)
        return scaled


class _Squeeze(torch.autograd.Function):
    """Returns features, their means, and a channel without values for _Excite; its backward completes that of both."""

    @staticmethod
    def forward(ctx: Any, features: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.pixels = features.shape[2] * features.shape[3]
        means = F.adaptive_avg_pool2d(features, 1)  # (N, C, 1, 1)
        return features.view_as(features), means, torch.empty_like(means)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_scaled: Tensor, of_means: Tensor, scale: Tensor) -> Tensor:
        """Return _Excite's gradient times its scale, plus each pixel's share of the gradient of the means."""
        return torch.addcmul(of_means / ctx.pixels, of_scaled, scale)


class _Excite(torch.autograd.Function):
    """Multiplies features by a scale. In backward, `channel` passes that scale to _Squeeze as if it were a gradient."""

    @staticmethod
    def forward(ctx: Any, features: Tensor, scale: Tensor, channel: Tensor) -> Tensor:  # noqa: ARG004
        ctx.save_for_backward(features, scale)
        return scale * features

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_scaled: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, scale = ctx.saved_tensors
        of_scale = (of_scaled * features).sum(PIXELS, keepdim=True)
        return of_scaled, of_scale, scale  # _Squeeze multiplies the first by the last
