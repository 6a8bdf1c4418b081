"""Settings for optional witnesses."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import NEUTRAL

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Draft


@dataclass(frozen=True, kw_only=True)
class WitnessSettings(Group):
    """Which anomalies of a step are located or skipped."""

    title: ClassVar[str] = "limits and checks"

    find_nan: Annotated[bool, NEUTRAL] = False
    """After a skipped step, recompute the gradients to name the rank whose gradients were not finite; each step is
    slower, since the host waits for it.
    """

    on_spike: Literal["report", "skip"] = "report"
    """For a rank's finite loss far above its recent ones: report names step, rank and samples; skip also skips the step
    on all ranks.
    """

    def uses(self) -> Iterable[Use]:
        if self.find_nan:  # without it a failing part of a replica is named, too
            yield Use(option="--find-nan", needs=(Capability.BACKWARD,))
        if self.on_spike == "skip":
            yield Use(option="--on-spike skip", needs=(Capability.LOSS, Capability.GRADIENTS))

    def fill(self, draft: "Draft") -> None:
        if self.find_nan:
            from hvdtrain.loop.witnesses.find_nan import FindNan

            draft.witnesses.append(FindNan())
        if self.on_spike == "skip":
            from hvdtrain.loop.witnesses.skip_spikes import SkipSpikes

            draft.witnesses.append(SkipSpikes(draft.job.device))
