"""Settings for measurements of a run."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, ClassVar, TypeVar

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import AT_LEAST_1, NEUTRAL, Alone, Auto, Rule
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Job

_PROFILE = re.compile(r"off|on|exact|timeline|trace:([1-9]\d{0,8})", re.ASCII)
PROFILE = Rule(
    holds=lambda value: _PROFILE.fullmatch(value) is not None,
    text="unknown. Choose off, on, exact, timeline or trace:STEPS, for example trace:5",
)


@dataclass(frozen=True, kw_only=True)
class ProfileSettings(Group):
    """Profiles, traces and timelines."""

    title: ClassVar[str] = "profiles"

    profile: Annotated[str, PROFILE, Alone(means="on"), NEUTRAL] = "off"
    """on (also --profile without a value) measures the phases of each step; exact also measures each phase in
    isolation; trace:5 also writes torch.profiler's trace of 5 steps into profile/ of the run folder. timeline measures
    nothing and writes Horovod's timeline.json into the run folder; an extra thread busy-waits meanwhile.
    """
    torch_profile: Annotated[int | None, AT_LEAST_1, NEUTRAL, Auto(why="--profile trace:STEPS traces steps")] = None
    """Steps to trace."""

    def uses(self) -> Iterable[Use]:
        if self.profile == "exact":
            yield Use(option="--profile exact", needs=(Capability.PHASES,))
        if self.profile == "timeline":
            yield Use(option="--profile timeline", needs=(Capability.WORLD,))

    def check_job(self, job: "Job") -> None:
        from hvdtrain.insight.profiling.passes import min_steps
        from hvdtrain.insight.profiling.trace import BEFORE_STEPS, unmeasured_steps

        if self.torch_profile is not None and self.torch_profile + BEFORE_STEPS > job.steps:
            raise BadInput(
                f"--profile trace:{self.torch_profile}: with {BEFORE_STEPS} steps of warm-up more than the run's "
                f"{job.steps} steps. Lower it, or raise {job.length_option}."
            )
        least = min_steps(unmeasured_steps(self.torch_profile), job.train.readers)
        if self.profile == "exact" and job.steps < least:
            raise BadInput(
                f"--profile exact: needs {least} steps to measure in two ways, the run has {job.steps}. Raise "
                f"{job.length_option}, or leave out =exact."
            )


S = TypeVar("S", bound=ProfileSettings)


def with_trace(settings: S) -> S:
    """Set the number of traced steps of --profile trace:STEPS; phases are measured then, too."""
    found = _PROFILE.fullmatch(settings.profile)
    if found is None or found[1] is None:
        return settings
    return replace(settings, profile="on", torch_profile=int(found[1]))
