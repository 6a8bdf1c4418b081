"""Saving when all ranks have decided so, and the best weights of a run."""

from collections.abc import Callable, Mapping

from hvdtrain.checkpoint.saves import Saves
from hvdtrain.core.position import Position
from hvdtrain.core.step import Step
from hvdtrain.loop.hooks import EpochDone, Hook
from hvdtrain.loop.loop import Loop
from hvdtrain.loop.save_points import AgreedSavePoints, Decision
from hvdtrain.safety.watchdog import Watchdog


class Saver(Hook):
    """Takes checkpoints at save points, before all ranks leave, and at the end."""

    def __init__(
        self,
        saves: Saves,
        points: AgreedSavePoints,
        step: Step,
        *,
        run: str,
        is_best: Callable[[Mapping[str, float]], bool],
        watchdog: Watchdog,
    ) -> None:
        """`run` is its name, `is_best` says whether the metrics of a test are better than all before."""
        self._saves, self._points, self._step, self._run = saves, points, step, run
        self._is_best, self._watchdog = is_best, watchdog

    def obey(self, decision: Decision, position: Position) -> None:
        """Save if all ranks have decided so; EndOfRun if they leave."""
        if decision.save:
            self._watchdog.begin_checkpoint(position.step)
            self._saves.save(position)
            self._points.saved()
        if decision.leave:
            self._saves.end_run(position, run=self._run)

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        self._watchdog.begin_checkpoint(position.step)
        best = self._step.task.best
        if self._is_best(done.test):
            self._saves.save_best(position, self._step.evaluated, **{f"eval_{best}": done.test[best]})

    def ranks_changed(self, loop: Loop) -> None:
        self._points.go_on()
        self._saves.go_on(global_batch=loop.feed.sizes.global_batch)

    def trained(self, position: Position) -> None:
        self._saves.save(position)
        self._saves.wait(position.step)
