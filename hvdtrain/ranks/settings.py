"""Settings for the communication of gradients."""

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
    """Compression of gradients: none, fp16, or powersgd:R, which sends two matrices of R columns each; by default fp16
    on GPUs and none on CPUs.
    """
    reducer: Literal["bucket", "horovod"] | None = None
    """bucket keeps gradients in flat buckets and sends each when its last gradient is complete; horovod wraps the
    optimizer in hvd.DistributedOptimizer, which sends all that are ready at once. By default horovod on GPUs, if the
    other options allow it, and bucket on CPUs.
    """
    fusion_threshold_mb: Annotated[float | None, AT_LEAST_0] = None
    """MiB of gradients sent at once. For horovod the maximum, 128 by default; for bucket the bucket size, 8 by default
    and 1 for the first bucket. 0 sends each gradient alone. If not given, horovodrun's --fusion-threshold-mb is used.
    """
    fusion_groups: Annotated[
        int | None, AT_LEAST_1, ASIDE, Chosen(why="the reducer horovod sends gradients as they come")
    ] = None
    """For the reducer horovod: number of fixed groups in which gradients are sent; in order of arrival if None."""
    cycle_time_ms: Annotated[
        float | None, POSITIVE, ASIDE, Chosen(why="Horovod's own pause holds, or that of HOROVOD_CYCLE_TIME")
    ] = None
    """Pause between Horovod's cycles; Horovod's default if None."""

    def check(self, given: set[str]) -> None:
        if self.compression not in (None, "none", "fp16") and power_rank(self.compression) is None:
            raise BadInput(
                f"--compression {self.compression}: unknown. Choose none, fp16 or powersgd:R, for example powersgd:2."
            )

    def uses(self) -> Iterable[Use]:
        if power_rank(self.compression) is not None:  # each rank keeps the remainder, in the scale of its loss
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
    """Return R of powersgd:R; None for anything else."""
    number = re.fullmatch(r"powersgd:([1-9]\d{0,4})", compression or "", re.ASCII)
    return None if number is None else int(number[1])
