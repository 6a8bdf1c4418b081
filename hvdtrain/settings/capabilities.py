"""Compatibility of settings: each declares which capabilities it takes and needs, without naming other settings."""

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from hvdtrain.settings.safety.exits import BadInput


class Capability(Enum):
    """Something that settings can rely on unless another takes it; the value is the reason for the conflict."""

    WORLD = "Horovod does not connect all ranks for the whole run"
    REPLICA = "the ranks of a replica hold parts of the model already"
    PHASES = "the ranks do not all wait for each other at each phase of a step"
    BACKWARD = "a rank cannot repeat its backward pass alone"
    TRACE = "the model cannot be traced as a whole"
    LAYERS = "the ranks do not all compute the same layers at the same time"
    NORMS = "each rank has only a slice of each layer, and no norm of a whole layer"
    TRAINED = "some parameters are not trained"
    UNSCALED = "gradients have a scale that changes"
    GRADIENTS = "the gradients themselves are not sent, only small matrices"
    FLAT = "every rank gets whole sums of gradients, not a part of them"
    LOSS = "no loss travels with its gradients"
    BUCKETS = "each gradient is sent alone"


@dataclass(frozen=True, kw_only=True)
class Use:
    """A setting in use: its option with the value, and the capabilities that it takes and needs."""

    option: str
    takes: tuple[Capability, ...] = ()
    needs: tuple[Capability, ...] = ()


def conflict(uses: Iterable[Use]) -> str | None:
    """Return why two settings do not work together: the first pair of which one takes what the other needs."""
    for use, other in itertools.permutations(uses, 2):
        for capability in use.needs:
            if capability in other.takes:
                return f"{use.option} does not work with {other.option}: {capability.value}."
    return None


def require_together(uses: Iterable[Use]) -> None:
    """Raise BadInput if two settings do not work together."""
    if (reason := conflict(uses)) is not None:
        raise BadInput(f"{reason} Use only one.")
