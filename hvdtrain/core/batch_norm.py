"""Batch normalisation: a model's layers and their running statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn


def layers(model: nn.Module) -> list[nn.modules.batchnorm._BatchNorm]:
    """Return the model's batch normalisation layers."""
    return [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]


def running_statistics(model: nn.Module) -> list[Tensor]:
    """Return the running means and variances of all layers."""
    buffers = [buffer for layer in layers(model) for buffer in layer.buffers()]
    return [buffer for buffer in buffers if buffer.is_floating_point()]


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Normalise with the running statistics, because the variance over one sample (or none) is undefined.

    Layers with `over_ranks` are not changed: they also see the samples of other ranks.
    """
    training = [layer for layer in layers(model) if layer.training and not getattr(layer, "over_ranks", False)]
    for layer in training:
        layer.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.train()
