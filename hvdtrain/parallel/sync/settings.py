"""Settings for the communication of gradients."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.parallel.sync.comm import SyncSchedule
from hvdtrain.parallel.sync.compression import Half, Uncompressed
from hvdtrain.parallel.sync.power_sgd import PowerSGD
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.notes import AT_LEAST_0, AT_LEAST_1, COLUMN, NEUTRAL, POSITIVE, Auto, matching
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Draft, Job

COMPRESSIONS: tuple[type[Uncompressed], ...] = (Uncompressed, Half, PowerSGD)
SYNC = r"flat|(two-level|local:(?P<steps>[1-9]\d{0,8})(@(?P<epoch>\d{1,8}))?)(/(?P<group>[1-9]\d{0,8}))?"


@dataclass(frozen=True, kw_only=True)
class SyncSettings(BatchSettings):
    """How and over which ranks gradients are summed, and how often all ranks synchronize."""

    title: ClassVar[str] = "gradients between ranks"

    compression: Annotated[str | None, COLUMN] = None
    """Compression of gradients: none, fp16, or powersgd:R, which sends two matrices of R columns each; by default fp16
    on GPUs and none on CPUs.
    """
    reducer: Literal["bucket", "horovod"] | None = None
    """bucket keeps gradients in flat buckets and sends each when its last gradient is complete; horovod sums them with
    hvd.DistributedOptimizer, which sends all that are ready at once. By default horovod on GPUs, if the other options
    allow it, and bucket on CPUs.
    """
    fusion_threshold_mb: Annotated[float | None, AT_LEAST_0] = None
    """MiB of gradients sent at once. For horovod the maximum, 128 by default; for bucket the bucket size, 8 by default
    and 1 for the first bucket. 0 sends each gradient alone. If not given, horovodrun's --fusion-threshold-mb is used.
    """
    fusion_groups: Annotated[
        int | None, AT_LEAST_1, NEUTRAL, Auto(why="the reducer horovod sends gradients as they come")
    ] = None
    """For the reducer horovod: number of fixed groups in which gradients are sent; in order of arrival if None."""
    cycle_time_ms: Annotated[
        float | None, POSITIVE, NEUTRAL, Auto(why="Horovod's own pause holds, or that of HOROVOD_CYCLE_TIME")
    ] = None
    """Pause between Horovod's cycles; Horovod's default if None."""

    shard_optimizer: bool = False
    """Divide the optimizer's state and the moving average over the ranks (ZeRO-1): each rank updates its part of the
    parameters, which all ranks then gather. Less memory, the same weights.
    """
    sync: Annotated[
        str,
        matching(
            SYNC,
            "must be flat, two-level, local:16 (rounds of 16 steps) or local:16@5 (after 5 epochs). Append /4 for "
            "groups of 4 ranks",
        ),
    ] = "flat"
    """flat sums over all ranks at once; two-level sums inside each host, then over hosts; local:K sums inside each host
    only, and hosts average their parameters every K steps, with local:K@E after E epochs. Append /N for groups of N
    consecutive ranks instead of those of a host, or of N replicas with --stages or --tensor: two-level/4, local:16/4.
    """

    @property
    def rounds(self) -> SyncSchedule | None:
        """The rounds of --sync local; None if all ranks synchronize at every step."""
        steps, epoch = self._sync("steps"), self._sync("epoch")
        return None if steps in (None, 1) else SyncSchedule(steps=steps, from_epoch=epoch or 0)

    @property
    def sync_group_size(self) -> int | None:
        """The replicas of a group; None for those of a host."""
        return self._sync("group")

    def _sync(self, part: str) -> int | None:
        found = re.fullmatch(SYNC, self.sync, re.ASCII)
        assert found is not None, "the rule of --sync"
        return None if found[part] is None else int(found[part])

    def compression_on(self, device_type: str) -> Uncompressed:
        """Return the compression: the given one, else fp16 on GPUs and none on CPUs; BadInput if it is unknown."""
        usual = "fp16" if device_type == "cuda" else "none"
        text = usual if self.compression is None else self.compression
        for kind in COMPRESSIONS:
            if (compression := kind.parse(text)) is not None:
                return compression
        *others, last = (kind.form for kind in COMPRESSIONS)
        raise BadInput(f"--compression {text}: unknown. Choose {', '.join(others)} or {last}.")

    def check(self, given: set[str]) -> None:
        self.compression_on("cpu")
        if self.rounds is not None and self.rounds.from_epoch >= self.epochs:
            raise BadInput(
                f"--sync {self.sync}: begins after the last of {self.epochs} epochs. Pass fewer epochs after @."
            )

    def uses(self) -> Iterable[Use]:
        yield from self.compression_on("cpu").uses()
        needs = (Capability.GRADIENTS,)
        if self.reducer == "horovod":
            yield Use(option="--reducer horovod", takes=(Capability.LOSS, Capability.FLAT), needs=needs)
        if self.shard_optimizer:
            yield Use(option="--shard-optimizer", needs=(Capability.FLAT, Capability.GRADIENTS))
        if self.fusion_threshold_mb is not None:
            buckets = (Capability.BUCKETS,) if self.fusion_threshold_mb else ()
            yield Use(option=f"--fusion-threshold-mb {self.fusion_threshold_mb:g}", needs=(*needs, *buckets))
        if self.sync.startswith("two-level"):
            yield Use(option="--sync two-level", takes=(Capability.WORLD, Capability.FLAT), needs=needs)
        elif self.sync.startswith("local"):
            apart = () if self.rounds is None else (Capability.LAYERS,)
            takes = (Capability.WORLD, Capability.PHASES, Capability.FLAT, *apart)
            yield Use(option="--sync local", takes=takes, needs=needs)

    def check_job(self, job: "Job") -> None:
        self.compression_on(job.device.type).check(job.model)
        divided = "--shard-optimizer" if self.shard_optimizer else f"--sync {self.sync}" if self.rounds else None
        if divided is not None and job.optimizer is not None:
            from hvdtrain.parallel.sync.sharded import require_elementwise

            require_elementwise(job.optimizer(job.model), divided)
        if self.rounds is not None and self.rounds.steps > job.sizes.steps_per_epoch:
            raise BadInput(
                f"--sync {self.sync}: an epoch has only {job.sizes.steps_per_epoch} steps, and a round "
                f"ends with it. Pass at most {job.sizes.steps_per_epoch}."
            )

    def fill(self, draft: "Draft") -> None:
        if self.shard_optimizer:
            from hvdtrain.parallel.sync.sharded import ShardedSync

            if isinstance(draft.how, ShardedSync):  # else there is a single replica
                draft.how.divide(draft)
        if self.rounds is not None:
            from hvdtrain.parallel.sync.rounds import local_rounds

            draft.when = local_rounds(draft, self.rounds)
