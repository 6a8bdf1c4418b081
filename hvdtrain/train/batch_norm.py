"""Batch normalisation: a model's layers and statistics, and layers over the samples of all ranks, on CPUs as on GPUs.

torch.nn.SyncBatchNorm and Horovod's own need CUDA. N samples of this rank, C channels, H W pixels.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hvdtrain.ranks.comm import Group


class SyncBatchNorm2d(nn.BatchNorm2d):
    """As nn.BatchNorm2d would be with the batches of all ranks put together; a rank's part may be empty."""

    def __init__(self, like: nn.BatchNorm2d, group: Group, name: str) -> None:
        device, dtype = like.weight.device, like.weight.dtype
        super().__init__(like.num_features, eps=like.eps, momentum=like.momentum, device=device, dtype=dtype)
        self.load_state_dict(like.state_dict())
        self.train(like.training)
        for own, other in zip(self.parameters(), like.parameters(), strict=True):
            own.requires_grad_(other.requires_grad)
        self._group = group
        self._name = name

    def __deepcopy__(self, memo: dict[int, object]) -> "SyncBatchNorm2d":
        return SyncBatchNorm2d(self, self._group, self._name)  # the ranks are not copied

    def forward(self, features: Tensor) -> Tensor:
        """(N, C, H, W) to the same shape and type; statistics in float32."""
        if not self.training:
            return super().forward(features)
        values = features.float()
        here = torch.tensor([values.numel() / self.num_features], device=values.device)
        sums = self._sum(torch.cat([values.sum((0, 2, 3)), here]), "mean")  # (C + 1,)
        count = sums[-1].detach()
        mean = sums[:-1] / count  # (C,)
        centred = values - mean[:, None, None]
        variance = self._sum(centred.square().sum((0, 2, 3)), "variance") / count  # (C,)
        self._remember(mean.detach(), variance.detach() * count / (count - 1).clamp(min=1))
        scale = self.weight * torch.rsqrt(variance + self.eps)  # (C,)
        return (centred * scale[:, None, None] + self.bias[:, None, None]).to(features.dtype)

    def _sum(self, values: Tensor, what: str) -> Tensor:
        return self._group.differentiable_allreduce(values, f"{self._name}.{what}")

    @torch.no_grad()
    def _remember(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        assert self.momentum is not None
        self.num_batches_tracked += 1
        self.running_mean.lerp_(mean, self.momentum)
        self.running_var.lerp_(unbiased_variance, self.momentum)


def convert(model: nn.Module, group: Group) -> None:
    """Replace every nn.BatchNorm2d inside `model` by one over all ranks."""
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.BatchNorm2d):
            parent, _, own = name.rpartition(".")
            setattr(model.get_submodule(parent), own, SyncBatchNorm2d(layer, group, f"sync_bn.{name}"))


def layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """The model's batch normalisation layers."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Running means and variances of all layers."""
    buffers = [buffer for layer in layers(model) for buffer in layer.buffers()]
    return [buffer for buffer in buffers if buffer.is_floating_point()]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Use the running statistics: the variance of a single sample's 1x1 features, or of none, does not exist.

    Batch norm over all ranks goes on: there are other samples.
    """
    local = [layer for layer in layers(model) if not isinstance(layer, SyncBatchNorm2d)]
    training = [layer for layer in local if layer.training]
    for layer in training:
        layer.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.train()
