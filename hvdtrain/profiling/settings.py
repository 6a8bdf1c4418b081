"""What is measured of a run."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import ASIDE, AT_LEAST_1, Alone

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Job


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Group):
    """Profiles, traces and timelines."""

    title: ClassVar[str] = "profiles"

    profile: Annotated[Literal["off", "on", "exact"], Alone(means="on"), ASIDE] = "off"
    """on (the option alone says it) measures the phases of each step; exact measures each phase alone as well."""
    torch_profile: Annotated[int | None, AT_LEAST_1, ASIDE] = None
    """Steps to trace with torch.profiler into profile/ of the run folder."""
    timeline: Annotated[bool, ASIDE] = False
    """Write Horovod's timeline.json into the run folder; a thread of its own spins meanwhile."""

    def uses(self) -> Iterable[Use]:
        if self.profile == "exact":
            yield Use(option="--profile exact", needs=(Capability.PHASES,))
        if self.timeline:
            yield Use(option="--timeline", needs=(Capability.WORLD,))

    def check_job(self, job: "Job") -> None:
        from hvdtrain.profiling.passes import min_steps
        from hvdtrain.profiling.step_clock import steps_before
        from hvdtrain.profiling.trace import BEFORE_STEPS

        if self.torch_profile is not None and self.torch_profile + BEFORE_STEPS > job.steps:
            raise BadInput(
                f"--torch-profile {self.torch_profile} after {BEFORE_STEPS} steps of warm-up is more than the run's "
                f"{job.steps} steps: lower it, or give more {job.length_option}"
            )
        if self.profile == "exact" and job.steps < (least := min_steps(steps_before(self))):
            raise BadInput(
                f"--profile exact needs {least} steps to measure them in two ways, the run has {job.steps}: give more "
                f"{job.length_option} or leave out =exact"
            )
