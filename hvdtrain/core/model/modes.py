"""Which modules of a model train, and which are in eval mode, for example frozen batch normalisation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn


def modes_of(model: nn.Module) -> list[tuple[nn.Module, bool]]:
    """Return the modules of a model, each with whether it is in training mode."""
    return [(module, module.training) for module in model.modules()]


def set_modes(modes: Sequence[tuple[nn.Module, bool]]) -> None:
    """Set the mode of each module."""
    for module, is_training in modes:
        module.training = is_training


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode; afterwards each module has its mode again."""
    before = modes_of(model)
    model.eval()
    try:
        yield
    finally:
        set_modes(before)


def train(model: nn.Module) -> None:
    """Let all modules of a model in eval mode train; a model that trains keeps the modes of its modules."""
    if not model.training:
        model.train()


def outermost_in_eval(model: nn.Module) -> list[str]:
    """Return the names of the modules in eval mode, without those inside them."""
    names = list[str]()
    for name, module in model.named_modules():
        if not module.training and not any(name.startswith(f"{outer}.") for outer in names):
            names.append(name)
    return names


class TrainingModes:
    """The modes in which the modules of a model train, as the program has set them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modes = modes_of(model) if model.training else [(module, True) for module in model.modules()]

    def keep(self) -> None:
        """Keep the modes that the program has set since, unless the model is in eval mode."""
        if self._model.training:
            self._modes = modes_of(self._model)

    def restore(self) -> None:
        """Put a model in eval mode back to the modes that were kept."""
        if not self._model.training:
            set_modes(self._modes)
