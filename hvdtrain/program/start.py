"""The start of a program on one rank: its settings, the ranks of the run, and the exit status.

Nothing here imports torch before the ranks have agreed on their settings, because the import takes seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar, cast

from hvdtrain.program.join import join_ranks
from hvdtrain.program.settings import Settings, parse
from hvdtrain.ranks.agree import agree
from hvdtrain.safety import exits
from hvdtrain.safety.exits import FAILED, BadInput, EndOfRun

if TYPE_CHECKING:
    import torch
    from torch import nn

    from hvdtrain.core.blocks import Cuts
    from hvdtrain.core.task import Task
    from hvdtrain.feed.datasets import Data
    from hvdtrain.program.training import Training
    from hvdtrain.ranks.comm import Comm

S = TypeVar("S", bound=Settings)
T = TypeVar("T")


def start(
    main: Callable[[Run[S]], object],
    *recipes: Callable[[], S],
    resolve: Callable[[S, set[str]], S] = lambda settings, _: settings,
) -> NoReturn:
    """Run `main` on this rank and end the process; BadInput on all ranks ends them with one line and status 2.

    `main` begins with the generators of torch, numpy and `random` seeded by --seed, alike on all ranks. `recipes`
    return default settings; a settings class is a recipe. The first is used without --recipe. `resolve` derives
    further settings from the fields that the command line names.
    """
    if "--multiprocessing-fork" in sys.orig_argv:  # else a worker process would start the program again
        raise RuntimeError('put hvdtrain.start below `if __name__ == "__main__":`, since workers import this file')

    def program() -> None:
        if "--remedies" in sys.argv[1:]:
            from hvdtrain.program.remedies import print_remedies

            print_remedies(parse(sys.argv[1:], recipes, resolve))
            return
        fallback = recipes[0]() if recipes and callable(recipes[0]) else cast("S", Settings())
        comm, settings = join_ranks(lambda argv: parse(argv, recipes, resolve), fallback)

        from hvdtrain.core.random_state import seed_generators  # imports torch

        seed_generators(settings.seed)
        if settings.dry_run:
            from hvdtrain.program.dry_run import count_step, print_cost

            print_cost(count_step(main, comm, settings), as_json=settings.json)
            return
        with ExitStack() as stack:
            run_to_end(main, Run(comm, settings, stack))

    exits.run(program)


def run_to_end(main: Callable[[Run[S]], object], run: Run[S]) -> None:
    """Run the program; raise what has ended its training early. `sys.exit(0)` in the loop is a stop like `break`."""
    try:
        main(run)
    except SystemExit as leaving:
        if leaving.code not in (None, 0) or run.started is None:
            raise
        run.started.require_end()
        raise
    if run.started is not None:
        run.started.require_end()


class Run(Generic[S]):
    """One rank of a running program."""

    device: torch.device

    def __init__(self, comm: Comm, settings: S, stack: ExitStack) -> None:
        from hvdtrain.program.checks import select_device

        self.ranks, self.settings = comm, settings
        self.started: Training | None = None
        self._stack = stack
        if settings.dry_run:
            from hvdtrain.costs.absent_gpu import GPU, absent_gpu

            self.device, self._absent = GPU, stack.enter_context(absent_gpu())
        else:
            self.device = select_device(comm, settings.precision)

    def agree(self, look: Callable[[], T]) -> T:
        """Return the result of `look` on this rank; raise BadInput on all ranks if it does so on any."""
        return agree(self.ranks, look)

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
        DataFrame. A Dataset's samples have the same forms: a tuple of two becomes the batch's `inputs` and `targets`.
        Its draws from torch, numpy.random and random are seeded for each sample. Only the dataset of a DataLoader is
        used. `max_steps` replaces the epochs of the settings. `about` is added to config.json, and all ranks call
        `at_end` before the result is written.

        `optimizer` is a function of the model that returns a torch optimizer with its parameter groups; the rates of
        the groups are their peaks, for any batch. `schedule` is a function of the run's progress, 0 to 1, that returns
        the share of the peak, and replaces warm-up and the shape of the settings.
        """
        from hvdtrain.program.assembly import with_own_recipe
        from hvdtrain.program.job import make_job
        from hvdtrain.program.training import Training

        if self.settings.dry_run:
            from hvdtrain.program.dry_run import Counted, measure, on_meta, refuse_if_it_trains

            job, _ = make_job(self, on_meta(model), task, train, test, cuts=cuts, max_steps=max_steps)
            job = with_own_recipe(self.settings, job, optimizer, schedule)
            of_host = copy(job.train)
            try:
                cost = measure(self.settings, job, self._absent)
            except Exception as error:
                refuse_if_it_trains(error, job.task, of_host, model)
                raise
            raise Counted(cost)
        if self.started is not None:
            raise BadInput("run.training: called before in this program. Start the program again for another training.")
        job, test_split = make_job(self, model, task, train, test, cuts=cuts, max_steps=max_steps)
        job = agree(self.ranks, lambda: with_own_recipe(self.settings, job, optimizer, schedule))
        self.started = Training(
            self.settings, job, test_split, self._stack.enter_context, about=about or {}, at_end=at_end
        )
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
