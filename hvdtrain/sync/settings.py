"""Settings for synchronizing ranks over slow links."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.ranks.settings import GradientSettings, power_rank
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Missing, requires
from hvdtrain.settings.notes import AT_LEAST_1
from hvdtrain.sync.comm import SyncSchedule

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Draft, Job


@dataclass(frozen=True, kw_only=True)
class SyncSettings(GradientSettings, BatchSettings):
    """Over which ranks gradients are summed, and how often all ranks synchronize."""

    title: ClassVar[str] = "gradients between ranks"

    sync: Literal["flat", "two-level", "local"] = "flat"
    """flat sums over all ranks at once; two-level sums inside each host, then over hosts; local sums inside each host
    only, and hosts average their parameters in rounds.
    """
    sync_every: str | None = None
    """K or K@E, for local: the steps in a round, and the epoch after which rounds begin."""
    sync_group_size: Annotated[int | None, AT_LEAST_1] = None
    """Group size in consecutive ranks, instead of those of a host; in replicas with --stages or --tensor."""

    @property
    def rounds(self) -> SyncSchedule | None:
        """The rounds of --sync local; None if all ranks synchronize at every step."""
        if self.sync != "local" or self.sync_every is None:
            return None
        steps, _, epoch = self.sync_every.partition("@")
        return None if steps == "1" else SyncSchedule(steps=int(steps), from_epoch=int(epoch or 0))

    def check(self, given: set[str]) -> None:
        if self.sync_every is None:
            return
        if re.fullmatch(r"[1-9]\d{0,8}(@\d{1,8})?", self.sync_every, re.ASCII) is None:
            raise BadInput(
                f"--sync-every {self.sync_every}: not the steps of a round. Pass --sync-every 16, or 16@5 to begin "
                "after 5 epochs."
            )
        if self.rounds is not None and self.rounds.from_epoch >= self.epochs:
            raise BadInput(
                f"--sync-every {self.sync_every}: begins after the last of {self.epochs} epochs. Pass fewer epochs "
                "after @."
            )

    def missing(self) -> Missing:
        if self.sync == "local":
            steps = "--sync-every 16, the steps of a round, or 16@5 to begin after 5 epochs"
            return {} if self.sync_every is not None else {requires("--sync local", steps): {}}
        if self.sync_every is not None:
            return {requires(f"--sync-every {self.sync_every}", "--sync local"): {"sync": "local"}}
        if self.sync == "flat" and self.sync_group_size is not None:
            choice = "--sync two-level, or --sync local --sync-every 16"
            return {requires(f"--sync-group-size {self.sync_group_size}", choice): {"sync": "two-level"}}
        return {}

    def uses(self) -> Iterable[Use]:
        needs = (Capability.GRADIENTS,)
        if self.sync == "two-level":
            yield Use(option="--sync two-level", takes=(Capability.WORLD,), needs=needs)
        elif self.sync == "local":
            apart = () if self.rounds is None else (Capability.LAYERS,)
            takes = (Capability.WORLD, Capability.PHASES, *apart)
            yield Use(option="--sync local", takes=takes, needs=needs)

    def check_job(self, job: "Job") -> None:
        from hvdtrain.sync.power_sgd import max_rank

        if self.rounds is not None and self.rounds.steps > job.sizes.steps_per_epoch:
            raise BadInput(
                f"--sync-every {self.sync_every}: an epoch has only {job.sizes.steps_per_epoch} steps, and a round "
                f"ends with it. Pass at most {job.sizes.steps_per_epoch}."
            )
        rank = power_rank(self.compression)
        if rank is not None and rank > (highest := max_rank(job.model)):
            remedy = f"Pass at most powersgd:{highest}" if highest else "Leave it out"
            raise BadInput(f"--compression powersgd:{rank}: halves no gradient of this model. {remedy}.")

    def fill(self, draft: "Draft") -> None:
        job, data, rank = draft.job, draft.job.comm.data, power_rank(self.compression)
        if rank is not None and data.size > 1:
            from hvdtrain.sync.power_sgd import PowerSGD

            draft.how = PowerSGD(job.model, rank=rank, ranks=data.size, begin_sum=data.begin_sum)
        if self.rounds is not None:
            from hvdtrain.sync.rounds import local_rounds

            draft.how = draft.make_sync()
            draft.when = local_rounds(draft, draft.how, self.rounds)
