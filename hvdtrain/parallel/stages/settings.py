"""Settings for cutting a model into stages."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.core.settings import BatchSettings
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Missing, requires
from hvdtrain.settings.notes import AT_LEAST_1, NEUTRAL, Auto

if TYPE_CHECKING:
    from hvdtrain.core.layout import Layout
    from hvdtrain.loop.draft import Job


@dataclass(frozen=True, kw_only=True)
class StageSettings(BatchSettings):
    """The cuts of the model, and the path of batches through its stages."""

    title: ClassVar[str] = "a model over several ranks"

    stages: Annotated[int, AT_LEAST_1] = 1
    """Cut the model over this many consecutive ranks; replicas = ranks / stages, and the batches of accumulate-steps
    pass through the stages one after the other.
    """
    stages_at: str | None = None
    """The first block of each stage after the first, for example 4,9. By default chosen from the blocks' measured
    times; a resumed run keeps its cuts.
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
        return "--stages", self.stages

    def missing(self) -> Missing:
        stages, subject = self.stages, f"--stages {self.stages}"
        if stages == 1 and self.stages_at is not None:
            stages, subject = self.stages_at.count(",") + 2, f"--stages-at {self.stages_at}"
        options = [f"--stages {stages}"] if self.stages < stages else []
        if self.accumulate_steps < stages:  # each stage needs a micro-batch
            options.append(f"--accumulate-steps {stages} or more")
        return {requires(subject, *options): {"stages": stages}} if options else {}

    def uses(self) -> Iterable[Use]:
        if self.stages > 1:
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
        if self.stages == 1 and not self.recompute:
            return
        from hvdtrain.parallel.stages.cut import require_blocks, require_names, require_stages

        blocks = require_blocks(job.cuts.blocks)
        if self.stages > 1:
            require_stages(blocks, self.stages, self.stages_at)
            require_names(job.model, blocks)

    def place(self, job: "Job") -> "Layout | None":
        if self.stages == 1 and not self.recompute:
            return None
        from hvdtrain.parallel.stages.cut import require_blocks, require_stages
        from hvdtrain.parallel.stages.layout import Recomputed, make_stages

        blocks = require_blocks(job.cuts.blocks)
        if self.stages == 1:
            return Recomputed(blocks)
        cuts = require_stages(blocks, self.stages, self.stages_at)
        return make_stages(job, cuts=cuts, order=self.pipeline_schedule, recompute=self.recompute)
