"""Saves when all ranks have decided to, and keeps the best weights of a run."""

import time
from collections.abc import Callable, Mapping

from hvdtrain.checkpoint.saves import Saves
from hvdtrain.core.position import Position
from hvdtrain.core.step import Step
from hvdtrain.feed.order import BatchSizes
from hvdtrain.loop.hooks import EpochDone, Hook
from hvdtrain.loop.save_points import AgreedSavePoints, Decision
from hvdtrain.safety.watchdog import Watchdog


class Saver(Hook):
    """Takes checkpoints at save points, before all ranks stop, and at the end."""

    def __init__(
        self,
        saves: Saves,
        points: AgreedSavePoints,
        step: Step,
        *,
        run: str,
        is_best: Callable[[Mapping[str, float]], bool],
        on_save: Callable[[float], None],
        watchdog: Watchdog,
    ) -> None:
        """Create the hook; `is_best` returns whether a test's metrics beat all earlier ones.

        `run` is the run's name. `on_save` receives the seconds for which a checkpoint has held the training.
        """
        self._saves, self._points, self._step, self._run = saves, points, step, run
        self._is_best, self._on_save, self._watchdog = is_best, on_save, watchdog

    def obey(self, decision: Decision, position: Position) -> None:
        """Save if all ranks have decided to; raise EndOfRun if they stop."""
        if decision.save:
            self._watchdog.begin_checkpoint(position.step)
            self._points.saved(self._save(position))
        if decision.leave:
            self._saves.end_run(position, run=self._run)

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        self._watchdog.begin_checkpoint(position.step)
        best = self._step.task.best
        if self._is_best(done.test):
            self._saves.save_best(position, self._step.evaluated, **{f"eval_{best}": done.test[best]})

    def ranks_changed(self, sizes: BatchSizes) -> None:
        self._saves.go_on(global_batch=sizes.global_batch)

    def trained(self, position: Position) -> None:
        self._save(position)
        self._saves.wait(position.step)

    def _save(self, position: Position) -> float:
        """Take a checkpoint; return the seconds for which it held the training."""
        began_s = time.perf_counter()
        self._saves.save(position)
        held_s = time.perf_counter() - began_s
        self._on_save(held_s)
        return held_s
