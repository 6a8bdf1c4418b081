"""Witnesses that a user asks for."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import ASIDE

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Draft


@dataclass(frozen=True, kw_only=True)
class WitnessSettings(Group):
    """What is looked for when a step is skipped."""

    title: ClassVar[str] = "limits and checks"

    find_nan: Annotated[bool, ASIDE] = False
    """After a skipped step compute the gradients once more, to name the rank whose own were not finite; each step is
    slower, since the host waits for it."""

    def uses(self) -> Iterable[Use]:
        if self.find_nan:  # without it a part of a replica is named, too
            yield Use(option="--find-nan", needs=(Capability.BACKWARD,))

    def fill(self, draft: "Draft") -> None:
        if self.find_nan:
            from hvdtrain.witnesses.find_nan import FindNan

            draft.witnesses.append(FindNan())
