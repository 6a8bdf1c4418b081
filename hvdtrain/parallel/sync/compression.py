"""Compressions of gradients: each class parses its option, builds the sums, counts what is sent, and says what it uses.

A new compression is a subclass in a file of its own, listed in COMPRESSIONS of sync/settings.py. Command lines are
parsed before the import of torch, which takes seconds: these files import it in functions only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, ClassVar, Self

from hvdtrain.settings.capabilities import Capability, Use

if TYPE_CHECKING:
    from torch import nn

    from hvdtrain.ranks.comm import ReplicaGroup
    from hvdtrain.ranks.sync import GradientSync


class Uncompressed:
    """Gradients in their own type; the base of all compressions."""

    form: ClassVar[str] = "none"  # the value of --compression; R is a number
    takes: ClassVar[tuple[Capability, ...]] = ()
    needs: ClassVar[tuple[Capability, ...]] = ()
    is_half: ClassVar[bool] = False  # sends fp16, see ranks.wire

    def __init__(self, name: str) -> None:
        self.name = name

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Return the compression of this option's value; None if it is another's."""
        return cls(text) if text == cls.form else None

    def uses(self) -> Iterator[Use]:
        """Return the capabilities that the option takes and needs."""
        if self.takes or self.needs:
            yield Use(option=f"--compression {self.name}", takes=self.takes, needs=self.needs)

    def check(self, model: nn.Module) -> None:
        """Raise BadInput for a model whose gradients this cannot compress."""

    def build(self, data: ReplicaGroup, model: nn.Module, *, loss_is_scaled: bool, **options: Any) -> GradientSync:
        """Return the sums of the model's gradients over these ranks; see `sum_gradients` for the options."""
        from hvdtrain.parallel.sync.reducers import sum_gradients
        from hvdtrain.ranks.wire import Wire

        wire = Wire(data.size, is_half=self.is_half, loss_is_scaled=loss_is_scaled)
        return sum_gradients(data, model, wire, **options)

    def sent_bytes(self, model: nn.Module) -> int:
        """Return the bytes of the gradients that a rank sends at each step."""
        elements = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
        return (2 if self.is_half else 4) * elements


class Half(Uncompressed):
    """Gradients in fp16, scaled."""

    form = "fp16"
    is_half = True
