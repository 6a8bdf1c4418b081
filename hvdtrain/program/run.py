"""One rank of a running program, and the training that it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hvdtrain.program.settings import Settings
from hvdtrain.ranks.agree import agree
from hvdtrain.settings.safety.exits import FAILED, BadInput, EndOfRun

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hvdtrain.core.blocks import Cuts
    from hvdtrain.core.task import Task
    from hvdtrain.loop.draft import Job
    from hvdtrain.loop.feed.datasets import Data
    from hvdtrain.loop.feed.feed import Split
    from hvdtrain.program.training import Training
    from hvdtrain.ranks.comm import Comm

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


class Run(Generic[S]):
    """One rank of a running program.

    >>> run.settings  # in main(run)
    Settings(epochs=1, batch_size_per_rank=2, run='a')
    >>> samples = run.agree(lambda: torch.arange(8.0)[:, None])  # or BadInput on all ranks
    """

    device: torch.device

    def __init__(self, comm: Comm, settings: S, stack: ExitStack) -> None:
        self.ranks, self.settings = comm, settings
        self.started: Training | None = None
        self._stack = stack
        self.device = self._select_device()

    def __repr__(self) -> str:
        return f"Run(rank {self.ranks.rank} of {self.ranks.size}, {self.device})"

    def _select_device(self) -> torch.device:
        from hvdtrain.program.checks import select_device

        return select_device(self.ranks, self.settings.precision)

    def agree(self, decide: Callable[[], T]) -> T:
        """Return the result of `decide` on this rank; raise BadInput on all ranks if it does so on any."""
        return agree(self.ranks, decide)

    def training(
        self,
        model: nn.Module | Callable[[], nn.Module],
        task: Task | Callable[..., torch.Tensor],
        train: Data,
        test: Data,
        *,
        cuts: Cuts | Callable[[Any], Cuts] | None = None,
        max_steps: int | None = None,
        about: Mapping[str, Any] | None = None,
        at_end: Callable[[Training], object] | None = None,
        optimizer: Callable[[Any], torch.optim.Optimizer] | None = None,
        schedule: Callable[[float], float] | None = None,
    ) -> Training:
        """Return the training, at its beginning or at the position of a checkpoint.

        `model` is on the host, equal on all ranks, or a function that makes it with the run's seed. A rank that keeps
        only a part of the model calls the function twice and needs memory for that part only. `cuts`, or a function of
        the model that returns them, describe how the model can be split over several ranks. `task` is a Task, or a
        function of the model and a batch that returns the loss of each sample, (N,). It is tried with two samples: one,
        the other and both, in eval mode. `train` and `test` are Splits, map-style Datasets, or columns with samples
        first: tensors, arrays or lists, alone, as (inputs, targets), or by name in a dict, namedtuple, dataclass or
        DataFrame. A Dataset's samples have the same forms: a tuple of two becomes the batch's `inputs` and `targets`;
        texts, bytes and dicts become lists. Its draws from torch, numpy.random and random are seeded for each sample.
        Only the dataset of a DataLoader is used. `test` may be a dict of Datasets or columns: the first selects the
        best weights, metrics of the others are called SET/METRIC. `max_steps` replaces the epochs of the settings.
        `about` is added to config.json, and all ranks call `at_end` before the result is written.

        `optimizer` is a function of the model that returns a torch optimizer with its parameter groups; the rates of
        the groups are their peaks, for any batch. `schedule` is a function of the run's progress, 0 to 1, that returns
        the share of the peak, and replaces warm-up and the shape of the settings.
        """
        from hvdtrain.program.assembly import with_own_recipe
        from hvdtrain.program.job import make_job

        if self.started is not None:
            raise BadInput("run.training: called before in this program. Start the program again for another training.")
        job, test_split = make_job(
            self.ranks,
            self.settings,
            self.device,
            model=self._source(model),
            task=task,
            data=(train, test),
            cuts=cuts,
            max_steps=max_steps,
        )
        job = agree(self.ranks, lambda: with_own_recipe(self.settings, job, optimizer, schedule))
        return self._begin(job, test_split, about or {}, at_end)

    def _source(self, model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
        return model

    def _begin(
        self, job: Job, test: Split, about: Mapping[str, Any], at_end: Callable[[Training], object] | None
    ) -> Training:
        from hvdtrain.program.training import Training

        self.started = Training(self.settings, job, test, self._stack.enter_context, about=about, at_end=at_end)
        self._stack.enter_context(_expecting_loop(self.started))
        return self.started


@contextmanager
def _expecting_loop(training: Training) -> Iterator[None]:
    """Raise EndOfRun if the body ends, but no loop over the training has begun."""
    yield
    if not training.has_begun:
        raise EndOfRun(
            "the program has ended without a loop over run.training(...), so nothing was learned. Write `for _ in "
            "run.training(...): pass`.",
            status=FAILED,
            reason="not trained",
        )
