"""Makes a Job from the model, task and data that a program passes, and checks it on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvdtrain.core.blocks import Cuts, blocks_of
from hvdtrain.core.task import Batch, Model, Sums, Task
from hvdtrain.feed.datasets import Data, as_split
from hvdtrain.feed.feed import Resident, Split
from hvdtrain.loop.draft import Job
from hvdtrain.model.modes import evaluating
from hvdtrain.model.state import unchanged
from hvdtrain.program.checks import require_batches
from hvdtrain.program.model_checks import require_parameters, require_savable
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.group import methods

if TYPE_CHECKING:
    from hvdtrain.program.settings import Settings
    from hvdtrain.program.start import Run


def make_job(
    run: Run[Any],
    model: nn.Module | Callable[[], nn.Module],
    task: Task | Callable[..., Tensor],
    train: Data,
    test: Data,
    *,
    cuts: Cuts | Callable[[Any], Cuts] | None,
    max_steps: int | None,
) -> tuple[Job, Split]:
    """Return the job and the test split; BadInput on all ranks if the job cannot be trained."""
    comm, settings, device = run.ranks, run.settings, run.device
    task = task if isinstance(task, Task) else FunctionTask(task)
    train_split, test_split = agree(
        comm, lambda: tuple(as_split(data, settings, comm, seed=settings.seed) for data in (train, test))
    )
    require_same_data(comm, train_split, test_split)
    sizes = agree(
        comm,
        lambda: require_batches(
            settings, train=len(train_split), test=len(test_split), ranks=comm.data.size, unit=task.unit
        ),
    )
    give_values = None
    if not isinstance(model, nn.Module):
        model, give_values = make_on_all(comm, settings, model)
    agree(comm, lambda: require_trainable(model, task, train_split))
    job = Job(
        comm=comm,
        device=device,
        model=model,
        task=task,
        train=train_split,
        cuts=cuts(model) if callable(cuts) else cuts or Cuts(blocks=blocks_of(model)),
        sizes=sizes,
        steps=max_steps or settings.epochs * sizes.steps_per_epoch,
        length_option="--epochs" if max_steps is None else "--max-steps",
        precision=settings.precision,
        give_values=give_values,
    )
    return job, test_split


def make_on_all(
    comm: Comm, settings: Settings, make: Callable[[], nn.Module]
) -> tuple[nn.Module, Callable[[nn.Module], None] | None]:
    """Make the model from the run's seed; or on meta, with a function that sets the values of a rank's part."""

    def seeded() -> nn.Module:
        torch.manual_seed(settings.seed)
        return make()

    outlines = (outline(comm, seeded) for outline in methods(settings, "outline"))
    outlined: tuple[nn.Module, Callable[[nn.Module], None]] | None = next(filter(None, outlines), None)
    return outlined or (agree(comm, seeded), None)


def require_same_data(comm: Comm, *splits: Split) -> None:
    """Raise BadInput on all ranks if the splits differ, judging by their lengths and first and last samples."""
    of_ranks = comm.allgather([[len(split), _hash_of_ends(split)] for split in splits])
    odd = [rank for rank, of_rank in enumerate(of_ranks) if of_rank != of_ranks[0]]
    if odd:
        raise BadInput(
            f"rank {odd[0]} has other samples than rank 0. Give all ranks the same samples in the same order: hvdtrain "
            "divides them among the ranks."
        )


def _hash_of_ends(split: Split) -> str | None:
    """Hash the first and last sample if they are tensors; samples of a Dataset may be random."""
    if not isinstance(split, Resident):
        return None
    ends = {name: [tensor[:1].tolist(), tensor[-1:].tolist()] for name, tensor in split.tensors.items()}
    return sha256(repr(ends).encode()).hexdigest()


def require_trainable(model: nn.Module, task: Task, split: Split) -> None:
    """Raise BadInput if the model cannot be trained, or its state cannot be saved and restored.

    A function is tried with two samples on the host. So is a Task if the model has lazy modules, which get their
    parameters in the first forward pass.
    """
    require_parameters(model)
    if isinstance(task, FunctionTask) or any(map(is_lazy, (*model.parameters(), *model.buffers()))):
        _try(model, task, split)
    if not next(model.parameters()).is_meta:
        require_savable(model)


def _try(model: nn.Module, task: Task, split: Split) -> None:
    """Compute the loss of two samples on the host; a model on meta is tried as far as it runs without values."""
    samples = torch.arange(min(2, len(split)))
    [raw] = split.batches([samples], torch.device("cpu"), None)
    is_meta = next(model.parameters()).is_meta
    with torch.no_grad(), torch.random.fork_rng(devices=()), evaluating(model), unchanged(model.modules()):
        try:
            batch = task.prepare(raw, samples, None)
            if is_meta:
                batch = {name: tensor.to("meta") for name, tensor in batch.items()}
            task.loss(model, batch, training=False)
        except Exception as error:
            if isinstance(error, BadInput) or not is_meta:
                raise


class FunctionTask(Task):
    """A task made from a function of the model and a batch that returns the loss of each sample, (N,)."""

    def __init__(self, losses: Callable[[Model, Batch], Tensor]) -> None:
        self._losses = losses

    def loss(self, model: Model, batch: Batch, *, training: bool) -> Sums:
        losses = self._losses(model, batch)
        samples = len(next(iter(batch.values())))
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        if shape != (samples,):
            raise BadInput(
                f"the loss function returned {shape} for {samples} samples. Return each sample's loss, ({samples},), "
                'for example cross_entropy(..., reduction="none").'
            )
        return Sums(loss=losses.sum(), count=losses.new_full((), samples, dtype=torch.float32))
