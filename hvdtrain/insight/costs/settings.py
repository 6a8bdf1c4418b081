"""Settings for predicting the cost of a step, before a GPU is rented."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Annotated, ClassVar

from hvdtrain.core.settings import PrecisionSettings
from hvdtrain.insight.costs.devices import DEVICES
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Missing, requires
from hvdtrain.settings.notes import NEUTRAL, one_of
from hvdtrain.settings.safety.exits import BadInput


@dataclass(frozen=True, kw_only=True)
class CostSettings(PrecisionSettings):
    """A step on an absent GPU."""

    title: ClassVar[str] = "costs"

    dry_run: Annotated[bool, NEUTRAL] = False
    """Do not train and do not write anything: print the cost of a step on a GPU, without needing one: memory,
    operators, bytes, time and the largest batch that fits. Data that would have to be downloaded are not needed.
    """
    device: Annotated[str | None, one_of(DEVICES), NEUTRAL] = None
    """For --dry-run: v100, a100, h100 or h200; all of them if not given."""
    json: Annotated[bool, NEUTRAL] = False
    """For --dry-run: print JSON for other programs instead of text."""

    def missing(self) -> Missing:
        beside = [("--device", self.device is not None), ("--json", self.json)]
        lines = [requires(name, "--dry-run") for name, is_given in beside if is_given and not self.dry_run]
        return {line: {"dry_run": True} for line in lines}

    def uses(self) -> Iterable[Use]:
        if self.dry_run:  # only in a single process that sees every operator
            yield Use(option="--dry-run", takes=(Capability.TRACE,), needs=(Capability.REPLICA,))

    def check(self, given: set[str]) -> None:
        if self.device is not None and self.precision == "bf16" and not DEVICES[self.device].has_bf16:
            raise BadInput(f"--device {self.device}: has no bf16. Use --precision fp16 or fp32.")
