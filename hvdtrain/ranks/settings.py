"""How gradients travel between ranks."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import ASIDE, AT_LEAST_0, AT_LEAST_1, COLUMN, POSITIVE, Chosen


@dataclass(frozen=True, kw_only=True)
class GradientSettings(Group):
    """How gradients are summed over ranks."""

    title: ClassVar[str] = "gradients between ranks"

    compression: Annotated[str | None, COLUMN] = None
    """How gradients travel: none, fp16, or powersgd:R, as two matrices of R columns each; fp16 on GPUs and none on CPUs
    if not given."""
    reducer: Literal["bucket", "horovod"] | None = None
    """bucket lets gradients lie in flat buckets and sends each when its last one is there; horovod is
    hvd.DistributedOptimizer around the optimizer, which sends as many at once as have come by then; horovod on GPUs,
    if the other options allow it, and bucket on CPUs if not given."""
    fusion_threshold_mb: Annotated[float | None, AT_LEAST_0] = None
    """MiB of gradients that are sent at once: for horovod at most, 128 if not given; for bucket a bucket's size, 8 if
    not given and 1 for the first. 0 sends each gradient alone. If not given, horovodrun's --fusion-threshold-mb is
    taken."""
    fusion_groups: Annotated[
        int | None, AT_LEAST_1, ASIDE, Chosen(why="the reducer horovod sends gradients as they come")
    ] = None
    """Of the reducer horovod: send the gradients in this many fixed groups; as they come if None."""
    cycle_time_ms: Annotated[
        float | None, POSITIVE, ASIDE, Chosen(why="Horovod's own pause holds, or that of HOROVOD_CYCLE_TIME")
    ] = None
    """Pause between Horovod's rounds; Horovod's own if None."""

    def check(self, given: set[str]) -> None:
        if self.compression not in (None, "none", "fp16") and power_rank(self.compression) is None:
            raise BadInput(
                f"--compression {self.compression}: unknown. Choose none, fp16 or powersgd:R, for example powersgd:2."
            )

    def uses(self) -> Iterable[Use]:
        if power_rank(self.compression) is not None:  # each rank keeps what it has left out, in its loss's scale
            yield Use(
                option=f"--compression {self.compression}",
                takes=(Capability.GRADIENTS,),
                needs=(Capability.RANK_STATE, Capability.UNSCALED),
            )
        if self.reducer == "horovod":
            yield Use(
                option="--reducer horovod", takes=(Capability.RESTART, Capability.LOSS), needs=(Capability.GRADIENTS,)
            )
        if self.fusion_threshold_mb is not None:
            needs = (Capability.GRADIENTS, Capability.BUCKETS) if self.fusion_threshold_mb else (Capability.GRADIENTS,)
            yield Use(option=f"--fusion-threshold-mb {self.fusion_threshold_mb:g}", needs=needs)


def power_rank(compression: str | None) -> int | None:
    """R of powersgd:R; None of anything else."""
    number = re.fullmatch(r"powersgd:([1-9]\d{0,4})", compression or "", re.ASCII)
    return None if number is None else int(number[1])
