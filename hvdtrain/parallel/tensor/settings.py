"""Settings for slicing layers over ranks; only for models that support it."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import AT_LEAST_1

if TYPE_CHECKING:
    from hvdtrain.core.layout import Layout
    from hvdtrain.loop.draft import Job


@dataclass(frozen=True, kw_only=True)
class TensorSettings(Group):
    """How layers are sliced."""

    title: ClassVar[str] = "a model over several ranks"

    tensor: Annotated[int, AT_LEAST_1] = 1
    """Slice each layer over this many consecutive ranks, which have the same batches; replicas = ranks / tensor."""

    def uses(self) -> Iterable[Use]:
        if self.tensor > 1:
            yield Use(
                option=f"--tensor {self.tensor}",
                takes=(
                    Capability.WORLD,
                    Capability.REPLICA,
                    Capability.PHASES,
                    Capability.BACKWARD,
                    Capability.TRACE,
                    Capability.NORMS,
                    Capability.LOSS,
                ),
                needs=(Capability.REPLICA,),
            )

    def place(self, job: "Job") -> "Layout | None":
        if self.tensor == 1:
            return None
        from hvdtrain.core.replica.point_to_point import join_replica_on_all
        from hvdtrain.parallel.tensor.layout import Slices

        assert job.cuts.split_layers is not None
        join_replica_on_all(job.comm, job.device, f"--tensor {self.tensor}", is_shared=job.is_shared)
        job.cuts.split_layers(job.model, job.comm.replica.rank, self.tensor)
        return Slices(job.comm, job.model)
