"""Batch and instance normalisation: a model's layers and their running statistics."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase


def layers(model: nn.Module) -> list[_BatchNorm]:
    """Return the model's batch normalisation layers."""
    return [module for module in model.modules() if isinstance(module, _BatchNorm)]


def running_statistics(model: nn.Module) -> list[str]:
    """Return the names of the running means and variances of all batch and instance normalisation layers."""
    return [
        f"{prefix}.{name}" if prefix else name
        for prefix, layer in model.named_modules()
        if isinstance(layer, _NormBase)
        for name in ("running_mean", "running_var")
        if getattr(layer, name) is not None
    ]


@contextmanager
def frozen(model: nn.Module, samples: int) -> Iterator[None]:
    """Normalise with the running statistics, because the variance over one sample (or none) is undefined.

    Instance normalisation has a variance of one sample. Layers with `over_ranks` are not changed: they also see the
    samples of other ranks.
    """
    kind = _BatchNorm if samples else _NormBase
    training = [
        layer
        for layer in model.modules()
        if isinstance(layer, kind) and layer.training and not getattr(layer, "over_ranks", False)
    ]
    for layer in training:
        layer.eval()
    try:
        yield
    finally:
        for layer in training:
            layer.train()
