"""Settings for runs that continue after a loss of ranks."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group, Missing, requires
from hvdtrain.settings.notes import AT_LEAST_1, NEUTRAL
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from hvdtrain.checkpoint.saves import Saves
    from hvdtrain.loop.draft import Job
    from hvdtrain.loop.loop import Membership
    from hvdtrain.loop.progress import Progress


@dataclass(frozen=True, kw_only=True)
class ElasticSettings(Group):
    """Behaviour of a run when a rank dies."""

    title: ClassVar[str] = "lost ranks and new ones"

    elastic: Annotated[bool, NEUTRAL] = False
    """If a rank dies, the others continue in place from the last step; on CPUs, with Open MPI 5 and mpirun --with-ft
    ulfm.
    """
    grow: Annotated[bool, NEUTRAL] = False
    """With elastic: start replacement ranks for lost ones; they join once they have loaded."""
    min_np: Annotated[int, AT_LEAST_1, NEUTRAL] = 1
    """With elastic: save and stop if fewer ranks are left."""

    def missing(self) -> Missing:
        joining = [f"--min-np {self.min_np}"] * (self.min_np > 1) + ["--grow"] * self.grow
        if not joining or self.elastic:
            return {}
        return {requires(" with ".join(joining), "--elastic"): {"elastic": True}}

    def uses(self) -> Iterable[Use]:
        if self.elastic:
            yield Use(
                option="--elastic",
                takes=(Capability.WORLD, Capability.RANK_STATE, Capability.PHASES, Capability.BATCH),
                needs=(Capability.WORLD, Capability.RESTART),
            )

    def check_job(self, job: "Job") -> None:
        # MPI's revoke does not end a sum that NCCL has begun, and after ncclCommAbort Horovod reports success.
        if self.elastic and job.device.type == "cuda":
            raise BadInput(
                "--elastic works on CPUs only: on GPUs a sum that NCCL has begun does not end when a rank dies. Leave "
                "it out, and start with hvdlaunch run --restarts 5 to resume from the last checkpoint."
            )

    def members(self, saves: "Saves", progress: "Progress", hang_timeout_s: float | None) -> "Membership | None":
        from hvdtrain.parallel.elastic.recovery import survivors

        if not self.elastic:
            return None
        return survivors(saves, progress, grow=self.grow, min_np=self.min_np, hang_timeout_s=hang_timeout_s)
