"""The parts of a replica: how the ranks that hold them decide, measure and name together."""

from collections.abc import Callable, Collection, Iterable, Sequence

from torch import Tensor, nn

from hvdtrain.core.finite import SUM, not_finite
from hvdtrain.ranks.comm import Comm, Members

TensorsOf = Callable[[nn.Parameter], Iterable[Tensor]]


class Whole:
    """The only part of a replica that one rank holds.

    Ranks that step together have the same summed gradients, and NaN and infinity survive a sum, so every rank reaches
    the same decision without communication. This would not hold for Adasum, which divides by norms, or for sparse
    gradients, which are gathered and not summed.
    """

    kind = ""  # of the parts of a replica, for messages; empty if it has one
    counted_before: Collection[int] = ()  # ids of parameters that an earlier rank of the replica counts in a norm
    tied: Collection[str] = ()  # names of parameters that another rank of the replica holds, too

    def stream(self, comm: Comm) -> int:
        """Return the number of this rank's stream of random numbers."""
        return comm.rank

    def sum_tied(self, model: nn.Module, tensors_of: TensorsOf) -> None:
        """Sum tensors of parameters that two ranks of a replica both hold, such as gradients; both get the same bits.

        The sum over replicas is done already.
        """

    def decide_skip(self, gradients: Sequence[Tensor], trouble: Tensor, group: Members) -> tuple[Tensor, Tensor]:
        """Return two flags: the ranks of `group`, which step together, skip the step; and this rank sees the cause.

        `trouble` is ignored, because batch norm statistics can be NaN only on a rank without samples, and that rank
        would skip the step alone.
        """
        bad = not_finite(gradients)
        return bad, bad

    def sent_bytes(self) -> tuple[dict[int, int], int]:
        """Return the bytes that a step sends inside the replica, as means over this process's steps.

        The first value maps each later rank to the bytes exchanged with it, per direction; the second is the size of
        the tensors that all ranks of the replica sum.
        """
        return {}, 0

    def name_failure(self, source: str) -> str:
        """Return the source of a failed forward pass, with the part of the replica in which it failed."""
        return source

    def name_failed_sum(self, bad_here: float) -> str:
        """Return the source if the summed gradients are not finite, with the part of the replica."""
        return SUM

    def split_dimensions(self, model: nn.Module) -> dict[str, int]:
        """Return the split dimension of each parameter that is only partly on this rank."""
        return {}

    def gather_full(self, comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        """Return the whole model's state dict on rank 0, and an empty dict on other ranks; a collective."""
        return model.state_dict() if comm.rank == 0 else {}


class Part(Whole):
    """This rank's part of a split replica; each rank sees only the failures of its own forward pass."""

    def __init__(self, comm: Comm, counted_before: Collection[int]) -> None:
        self._comm, self.counted_before = comm, counted_before

    def decide_skip(self, gradients: Sequence[Tensor], trouble: Tensor, group: Members) -> tuple[Tensor, Tensor]:
        bad_here = not_finite([*gradients, trouble])
        return bad_here.clone().fill_(max(group.allgather(bad_here.item()))), bad_here

    def gather_full(self, comm: Comm, model: nn.Module) -> dict[str, Tensor]:
        from hvdtrain.core.replica.point_to_point import gather_parts

        device = next(model.parameters()).device
        return gather_parts(comm, model.state_dict(), self.split_dimensions(model), device)

    def name_failure(self, source: str) -> str:
        return f"{source} of {self.kind} {self._comm.replica.rank}"

    def name_failed_sum(self, bad_here: float) -> str:
        bad = self._comm.replica.allgather(bad_here)  # backward runs from the last part to the first
        return f"{SUM} of {self.kind} {max(part for part, is_bad in enumerate(bad) if is_bad)}"
