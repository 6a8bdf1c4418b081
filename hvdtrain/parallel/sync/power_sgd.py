"""PowerSGD (Vogels et al. 2019) as a compression: two matrices of R columns for each gradient."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, Self

from hvdtrain.parallel.sync.compression import Uncompressed
from hvdtrain.settings.capabilities import Capability
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from torch import nn

    from hvdtrain.ranks.comm import ReplicaGroup
    from hvdtrain.ranks.sync import GradientSync

LEAST_GAIN = 2  # torch compresses what shrinks to less than half


class PowerSGD(Uncompressed):
    """Low-rank approximations of gradients; each rank keeps the remainder, in the scale of its loss."""

    form = "powersgd:R, for example powersgd:2"
    takes = (Capability.GRADIENTS,)
    needs = (Capability.UNSCALED,)

    def __init__(self, rank: int) -> None:
        super().__init__(f"powersgd:{rank}")
        self.rank = rank

    @classmethod
    def parse(cls, text: str) -> Self | None:
        number = re.fullmatch(r"powersgd:([1-9]\d{0,4})", text, re.ASCII)
        return None if number is None else cls(int(number[1]))

    def check(self, model: nn.Module) -> None:
        highest = max(((n * m - 1) // (LEAST_GAIN * (n + m)) for n, m in _matrices(model)), default=0)
        if self.rank > highest:
            remedy = f"Pass at most powersgd:{highest}" if highest else "Leave it out"
            raise BadInput(f"--compression {self.name}: halves no gradient of this model. {remedy}.")

    def build(self, data: ReplicaGroup, model: nn.Module, *, loss_is_scaled: bool, **options: Any) -> GradientSync:
        if data.size == 1:
            return super().build(data, model, loss_is_scaled=loss_is_scaled, **options)
        from hvdtrain.parallel.sync.low_rank import LowRankSync

        return LowRankSync(model, data, rank=self.rank)

    def sent_bytes(self, model: nn.Module) -> int:
        sizes = [(n * m, min(n, m, self.rank) * (n + m)) for n, m in _matrices(model)]
        saved = sum(full - low_rank for full, low_rank in sizes if LEAST_GAIN * low_rank < full)
        return super().sent_bytes(model) - 4 * saved


def _matrices(model: nn.Module) -> list[tuple[int, int]]:
    """Return rows and columns of the trained parameters that are matrices."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return [(len(parameter), parameter[0].numel()) for parameter in trained if parameter.dim() > 1]
