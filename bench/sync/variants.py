"""The prototypes by the names that the tables have."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch.optim import Optimizer

from sync import ALONE, FLAT
from sync.delayed import Delayed
from sync.flat import Flat, Half
from sync.groups import Alone, Groups, Sync
from sync.local import Local
from sync.local_overlapped import LocalOverlapped
from sync.ours import Ours
from sync.power_sgd import PowerSGD
from sync.top_k import TopK
from sync.two_level import TwoLevel


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to keep ranks together."""

    make: Callable[[Groups, Optimizer], Sync]
    accumulate: int = 1  # batches of a step
    cycle: int = 1  # batches until everything comes again
    overlaps: bool = False  # what is under way after a cycle belongs to it: one cycle must go before


VARIANTS: dict[str, Variant] = {
    ALONE: Variant(make=Alone),
    FLAT: Variant(make=Flat),
    "hvdtrain today": Variant(make=Ours),
    "two-level": Variant(make=TwoLevel),
    "fp16": Variant(make=Half),
    "delayed": Variant(make=Delayed),
    "accumulation 4": Variant(make=Flat, accumulate=4, cycle=4),
    "top-k 1 %": Variant(make=partial(TopK, share=0.01)),
    "PowerSGD 1": Variant(make=partial(PowerSGD, rank=1)),
    "PowerSGD 2": Variant(make=partial(PowerSGD, rank=2)),
    "PowerSGD 4": Variant(make=partial(PowerSGD, rank=4)),
    "local 4": Variant(make=partial(Local, every=4), cycle=4),
    "local 16": Variant(make=partial(Local, every=16), cycle=16),
    "local 16, parameters alone": Variant(make=partial(Local, every=16, momenta=False), cycle=16),
    "local 16, overlapped": Variant(make=partial(LocalOverlapped, every=16), cycle=16, overlaps=True),
}
