"""A model that is bound by communication: 25 million parameters, and one multiplication with each."""

import itertools

from torch import nn

INPUTS = 3 * 32 * 32
HIDDEN = (2144,) * 5


def mlp(classes: int = 10) -> nn.Module:
    """Six linear layers for images of 32 x 32 pixels: (N, 3, 32, 32) -> (N, classes), 25.0 million parameters."""
    layers: list[nn.Module] = [nn.Flatten()]
    for inputs, outputs in itertools.pairwise((INPUTS, *HIDDEN)):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(HIDDEN[-1], classes))
