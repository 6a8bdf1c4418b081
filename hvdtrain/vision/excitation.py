"""Squeeze-excitation with a backward pass that moves fewer bytes than autograd's."""

from typing import Any

import torch
import torch.nn.functional as F
import torchvision
from torch import Tensor, nn

PIXELS = (2, 3)


class SqueezeExcitation(torchvision.ops.SqueezeExcitation):  # type: ignore[misc]
    """torchvision's SqueezeExcitation, with equal outputs and names; the features' gradient is rounded once less.

    Autograd would write that gradient three times: through the product, through the mean, and the sum of both.
    """

    def forward(self, features: Tensor) -> Tensor:  # (N, C, H, W)
        """Multiply each channel by a scale computed from the means of all channels of the image."""
        features, means, channel = _Squeeze.apply(features)  # type: ignore[no-untyped-call]
        scale = self.scale_activation(self.fc2(self.activation(self.fc1(means))))
        scaled: Tensor = _Excite.apply(features, scale, channel)  # type: ignore[no-untyped-call]
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


def convert(model: nn.Module) -> None:
    """Replace the backward pass of every SqueezeExcitation of torchvision inside `model`."""
    for module in model.modules():
        if type(module) is torchvision.ops.SqueezeExcitation:
            module.__class__ = SqueezeExcitation
