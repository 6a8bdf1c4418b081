"""A replica with layers sliced over several ranks."""

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from hvdtrain.core.layout import Forward, Layout, Passes
from hvdtrain.core.parts import Part
from hvdtrain.core.task import Batch
from hvdtrain.parallel.tensor import linear
from hvdtrain.ranks.comm import Comm


class SlicePart(Part):
    """This rank's slice of each layer of a replica, and the bytes that it sums with others."""

    kind = "slice"

    def __init__(self, comm: Comm, model: nn.Module) -> None:
        sliced = linear.sliced_parameters(model)
        whole = {id(parameter) for name, parameter in model.named_parameters() if name not in sliced}
        super().__init__(comm, whole if comm.replica.rank else set())
        self.steps = self.summed_bytes = 0

    def stream(self, comm: Comm) -> int:
        return comm.data.rank  # slices of a layer draw equal numbers, since their outputs are added

    def sent_bytes(self) -> tuple[dict[int, int], int]:
        return {}, self.summed_bytes // max(1, self.steps)

    def split_dimensions(self, model: nn.Module) -> dict[str, int]:
        return linear.sliced_parameters(model)


class Slices(Layout):
    """A replica whose ranks each hold a slice of each layer."""

    def __init__(self, comm: Comm, model: nn.Module) -> None:
        self.part: SlicePart = SlicePart(comm, model)
        self.metadata: Mapping[str, Any] = {"slices": comm.replica.size}

    def train(self, step: Forward, batches: Iterable[Batch], passes: Passes) -> None:
        before = linear.sent["summed_bytes"]
        super().train(step, batches, passes)
        self.part.steps += 1
        self.part.summed_bytes += linear.sent["summed_bytes"] - before
