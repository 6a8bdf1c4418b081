"""Settings for predicting the cost of a step, before a GPU is rented."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdtrain.core.settings import PrecisionSettings
from hvdtrain.insight.costs.devices import DEVICES
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.notes import NEUTRAL, Alone, Rule
from hvdtrain.settings.safety.exits import BadInput

DRY_RUN = Rule(
    holds=lambda value: {*value.split(",")} <= {"on", "json", *DEVICES},
    text=f"unknown. Choose on, json or {', '.join(DEVICES)}, or several with commas, for example json,h100",
)


@dataclass(frozen=True, kw_only=True)
class CostSettings(PrecisionSettings):
    """A step on an absent GPU."""

    title: ClassVar[str] = "costs"

    dry_run: Annotated[str | None, DRY_RUN, Alone(means="on"), NEUTRAL] = None
    """Do not train and do not write anything: print the cost of a step on a GPU, without needing one: memory,
    operators, bytes, time and the largest batch that fits. Data that would have to be downloaded are not needed. v100,
    a100, h100 or h200 is one GPU, on (also --dry-run without a value) all of them; json prints JSON for other programs.
    """

    @property
    def dry_run_words(self) -> list[str]:
        """The words of --dry-run."""
        return [] if self.dry_run is None else self.dry_run.split(",")

    def uses(self) -> Iterable[Use]:
        if self.dry_run:  # only in a single process that sees every operator
            yield Use(option="--dry-run", takes=(Capability.TRACE,), needs=(Capability.REPLICA,))

    def check(self, given: set[str]) -> None:
        for name in self.dry_run_words:
            if name in DEVICES and self.precision == "bf16" and not DEVICES[name].has_bf16:
                raise BadInput(f"--dry-run {name}: has no bf16. Use --precision fp16 or fp32.")
