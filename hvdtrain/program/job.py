"""Makes a Job from the model, task and data that a program passes, and checks it on all ranks."""

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from hvdtrain.checkpoint.run_folder import unfinished_run
from hvdtrain.core.blocks import Cuts, blocks_of
from hvdtrain.core.task import Batch, Model, Sums, Task
from hvdtrain.loop.draft import Job
from hvdtrain.loop.feed.datasets import Data, as_split, as_test_split
from hvdtrain.loop.feed.feed import Split
from hvdtrain.program.checks import require_batches, require_parameters, require_savable
from hvdtrain.program.same_data import require_same_data
from hvdtrain.program.settings import Settings
from hvdtrain.program.task_trial import try_on_meta, try_task
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety import life
from hvdtrain.settings.safety.exits import BadInput, print_message


def make_job(
    comm: Comm,
    settings: Settings,
    device: torch.device,
    *,
    model: nn.Module | Callable[[], nn.Module],
    task: Task | Callable[..., Tensor],
    data: tuple[Data, Data],
    cuts: Cuts | Callable[[Any], Cuts] | None,
    max_steps: int | None,
) -> tuple[Job, Split]:
    """Return the job and the test split, from training and test `data`; BadInput on all ranks if it cannot train."""
    task = as_task(task)
    life.doing("reading the first samples")
    train = agree(comm, lambda: as_split(data[0], settings, comm, seed=settings.seed))
    test, test_sets = agree(comm, lambda: as_test_split(data[1], settings, comm, seed=settings.seed))
    tested = min(map(len, test_sets.values()))
    hashed = None if settings.dry_run else require_same_data(comm, train, test)
    sizes = agree(
        comm,
        lambda: require_batches(settings, train=len(train), test=tested, ranks=comm.data.size, unit=task.unit),
    )
    life.doing("making the model and trying the task")
    if not isinstance(model, nn.Module):
        model = make_on_all(comm, settings.seed, model)
    is_tried = fact(os.environ, "restart", 0) > 0 and unfinished_run(settings) is not None  # it has saved already
    for warning in agree(
        comm,
        lambda: require_trainable(settings, device, model, task, train, tests=(test, test_sets), is_tried=is_tried),
    ):
        if comm.rank == 0:
            print_message("warning", warning)
    job = Job(
        comm=comm,
        device=device,
        model=model,
        task=task,
        train=train,
        test_sets=test_sets,
        cuts=cuts(model) if callable(cuts) else cuts or Cuts(blocks=blocks_of(model)),
        sizes=sizes,
        steps=max_steps or settings.epochs * sizes.steps_per_epoch,
        length_option="--epochs" if max_steps is None else "--max-steps",
        precision=settings.precision,
        data=hashed,
    )
    return job, test


def make_on_all(comm: Comm, seed: int, make: Callable[[], nn.Module]) -> nn.Module:
    """Make the model, from the same random numbers on all ranks."""

    def seeded() -> nn.Module:
        torch.manual_seed(seed)
        return make()

    return agree(comm, seeded)


def require_trainable(
    settings: Settings,
    device: torch.device,
    model: nn.Module,
    task: Task,
    split: Split,
    *,
    tests: tuple[Split, Mapping[str, range]],
    is_tried: bool = False,
) -> list[str]:
    """Try the task; return warnings. BadInput if the model cannot be trained, or its state not saved and restored.

    A Task may hold tensors on the device, so it is tried only if the model can go there, and only once, since a restart
    must not take long. Lazy modules get their parameters in the trial.
    """
    require_parameters(model)
    title = task.title if isinstance(task, FunctionTask) else type(task).__name__
    if next(model.parameters()).is_meta:  # of a dry run
        if isinstance(task, FunctionTask):
            try_on_meta(task, model, split)
        return []
    _, parts = settings.parts
    trial_device = torch.device("cpu") if settings.dry_run or parts > 1 else device
    has_lazy, warnings = any(map(is_lazy, (*model.parameters(), *model.buffers()))), list[str]()
    if not has_lazy:
        require_savable(model)
    if has_lazy or (not is_tried and (isinstance(task, FunctionTask) or trial_device == device)):
        how: Any = {"title": title, "device": trial_device, "precision": settings.precision}
        warnings = try_task(task, model, split, tests, **how)
    if has_lazy:
        require_savable(model)
    return warnings


def as_task(task: Task | Callable[..., Tensor]) -> Task:
    """Return the task, or a task of the function; BadInput for anything else."""
    if isinstance(task, Task):
        return task
    if isinstance(task, type):
        raise BadInput(f"{task.__name__}: a class, not a task. Pass {task.__name__}().")
    if not callable(task):
        raise BadInput(f"the task is a {type(task).__name__}. Pass a hvdtrain.Task, or a function that returns losses.")
    return FunctionTask(task)


class FunctionTask(Task):
    """A task made from a function of the model and a batch that returns the loss of each sample, (N,)."""

    title = "the loss function"

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
