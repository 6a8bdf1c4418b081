"""Settings for cutting a model into stages."""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Missing, requires
from hvdtrain.settings.notes import NEUTRAL, Auto, Rule

if TYPE_CHECKING:
    from hvdtrain.core.layout import Layout
    from hvdtrain.loop.draft import Job


def _is_cut(stages: str) -> bool:
    """Return whether `stages` is a number of at least 1, or growing first blocks from 0."""
    if re.fullmatch(r"[1-9]\d{0,8}|0(,[1-9]\d{0,8})+", stages, re.ASCII) is None:
        return False
    starts = [int(start) for start in stages.split(",")]
    return starts == sorted(set(starts))


STAGES = Rule(holds=_is_cut, text="must be the number of stages, as in 3, or their first blocks from 0, as in 0,4,9")


@dataclass(frozen=True, kw_only=True)
class StageSettings(BatchSettings):
    """The cuts of the model, and the path of batches through its stages."""

    title: ClassVar[str] = "a model over several ranks"

    stages: Annotated[str, STAGES] = "1"
    """Cut the model over this many consecutive ranks; replicas = ranks / stages, and the batches of accumulate-steps
    pass through the stages one after the other. The blocks' measured times choose the cuts, and a resumed run keeps
    them; 0,4,9 makes three stages that begin with these blocks.
    """
    pipeline_schedule: Annotated[
        Literal["1f1b", "gpipe"], NEUTRAL, Auto(why="1f1b waits no longer than gpipe and holds fewer batches")
    ] = "1f1b"
    """1f1b keeps one batch per stage in memory, gpipe all batches of accumulate-steps."""
    recompute: Annotated[bool, NEUTRAL] = False
    """Keep only the outputs of blocks, and recompute the activations inside them in the backward pass: less memory
    for a second forward pass.
    """

    @property
    def parts(self) -> tuple[str, int]:
        """The option that splits a replica over several ranks, and their number."""
        return "--stages", self._count

    @property
    def _count(self) -> int:
        return int(self.stages) if self._cuts is None else len(self._cuts) + 1

    @property
    def _cuts(self) -> list[int] | None:
        """The first block of each stage after the first; None if only the number of stages is given."""
        return [int(start) for start in self.stages.split(",")][1:] or None

    def missing(self) -> Missing:
        if self.accumulate_steps >= self._count:  # each stage needs a micro-batch
            return {}
        return {requires(f"--stages {self.stages}", f"--accumulate-steps {self._count} or more"): {}}

    def uses(self) -> Iterable[Use]:
        if self._count > 1:
            yield Use(
                option=f"--stages {self.stages}",
                takes=(
                    Capability.WORLD,
                    Capability.REPLICA,
                    Capability.PHASES,
                    Capability.BACKWARD,
                    Capability.LOSS,
                ),
                needs=(Capability.REPLICA, Capability.TRAINED),
            )

    def check_job(self, job: "Job") -> None:
        if self._count == 1 and not self.recompute:
            return
        from hvdtrain.parallel.stages.cut import require_blocks, require_names, require_stages

        blocks = require_blocks(job.cuts.blocks)
        if self._count > 1:
            require_stages(blocks, self._count, self._cuts)
            require_names(job.model, blocks)

    def place(self, job: "Job") -> "Layout | None":
        if self._count == 1 and not self.recompute:
            return None
        from hvdtrain.parallel.stages.cut import require_blocks
        from hvdtrain.parallel.stages.layout import Recomputed, make_stages

        blocks = require_blocks(job.cuts.blocks)
        if self._count == 1:
            return Recomputed(blocks)
        return make_stages(job, cuts=self._cuts, order=self.pipeline_schedule, recompute=self.recompute)
