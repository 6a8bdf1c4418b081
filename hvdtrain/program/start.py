"""The start of a program on one rank: its settings, the ranks of the run, and the exit status.

Nothing here imports torch before the ranks have agreed on their settings, because the import takes seconds.
"""

import argparse
import sys
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from typing import NoReturn, TypeVar, cast

from hvdtrain.program.join import join_ranks
from hvdtrain.program.run import Run
from hvdtrain.program.settings import Settings, parse
from hvdtrain.settings.safety import exits, life

S = TypeVar("S", bound=Settings)


def start(
    main: Callable[[Run[S]], object],
    *recipes: Callable[[], S],
    resolve: Callable[[S, set[str]], S] = lambda settings, _: settings,
) -> NoReturn:
    """Run `main` on this rank and end the process; BadInput on all ranks ends them with one line and status 2.

    `main` begins with the generators of torch, numpy and `random` seeded by --seed, alike on all ranks. `recipes`
    return default settings; a settings class is a recipe. The first is used without --recipe. `resolve` derives
    further settings from the fields that the command line names.

    >>> def main(run):
    ...     print(run)
    >>> try:
    ...     hvdtrain.start(main, hvdtrain.Settings)
    ... except SystemExit as end:
    ...     print("status", end.code)
    Run(rank 0 of 1, cpu)
    status 0
    """
    if "--multiprocessing-fork" in sys.orig_argv:  # else a worker process would start the program again
        raise RuntimeError('put hvdtrain.start below `if __name__ == "__main__":`, since workers import this file')

    def program() -> None:
        if "--remedies" in sys.argv[1:]:  # the last word of hvdlaunch tune
            from hvdtrain.program.remedies import print_remedies

            sys.argv.remove("--remedies")
            print_remedies(parse(sys.argv[1:], recipes, resolve))
            return
        if exits.launched_rank() == 0:
            exits.report(doing="starting")  # hvdlaunch knows that this program reports
            life.begin()
        life.doing("connecting the ranks")
        fallback = recipes[0]() if recipes and callable(recipes[0]) else cast("S", Settings())
        comm, settings = join_ranks(lambda argv: parse(argv, recipes, resolve), fallback)

        from hvdtrain.core.random_state import seed_generators  # imports torch

        seed_generators(settings.seed)
        if settings.dry_run:
            from hvdtrain.program.dry_run import count_step, print_cost

            print_cost(count_step(main, comm, settings), as_json="json" in settings.dry_run_words)
            return
        with ExitStack() as stack:
            life.doing("running the program")
            run_to_end(main, Run(comm, settings, stack))

    exits.run(program)


def run_to_end(main: Callable[[Run[S]], object], run: Run[S]) -> None:
    """Run the program; raise what has ended its training early. `sys.exit(0)` in the loop is a stop like `break`."""
    try:
        main(run)
    except SystemExit as leaving:
        files = [frame.filename for frame in traceback.extract_tb(leaving.__traceback__)]
        if leaving.code == exits.BAD_INPUT and argparse.__file__ in files:
            raise exits.BadInput(
                "the program parses the command line itself, which also has hvdtrain's options. Make its options "
                "fields of a subclass of hvdtrain.Settings, and read them from run.settings."
            ) from leaving
        if leaving.code not in (None, 0) or run.started is None:
            raise
        run.started.require_end()
        raise
    if run.started is not None:
        run.started.require_end()
