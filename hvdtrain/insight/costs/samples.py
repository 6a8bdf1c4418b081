"""Samples without values, for a step without its data."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from hvdtrain.core.phases import OFF, Phases
from hvdtrain.core.task import Batch


class BlankSplit:
    """A split of zeros; each batch is copied to the device by itself, as with files."""

    reads_files, readers = True, 0
    content: str | None = None

    def __init__(
        self, samples: int, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], *, assumed: str
    ) -> None:
        """Create the split; `shapes` has shape and type of each tensor of a sample, by name.

        `assumed` describes the assumed data to the user.
        """
        self._samples, self._shapes, self.assumed = samples, shapes, assumed

    def __len__(self) -> int:
        return self._samples

    def batches(
        self, indices: Sequence[Tensor], device: torch.device, epoch: int | None, phases: Phases = OFF
    ) -> Iterator[Batch]:
        for samples in indices:
            yield {
                name: torch.zeros((len(samples), *shape), dtype=dtype).to(device)
                for name, (shape, dtype) in self._shapes.items()
            }
