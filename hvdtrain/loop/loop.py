"""The training loop: steps, reports and evaluations, from a position to the end of the run."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from hvdtrain.core.pending import Pending
from hvdtrain.core.position import Position
from hvdtrain.core.step import Step
from hvdtrain.core.task import added, metrics_of
from hvdtrain.loop.evaluation import ProgressBar, evaluate, no_bar
from hvdtrain.loop.feed.feed import Feed, Split
from hvdtrain.loop.hooks import EpochDone, Hook, Rate
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Report, Reports
from hvdtrain.loop.save_points import LEAVE, NEVER, Decision, SavePoints
from hvdtrain.settings.safety.exits import EndOfRun
from hvdtrain.settings.safety.watchdog import OFF, Watchdog

_PendingStep = tuple[int, float, tuple[Tensor, ...], Pending]  # a step's number, the count of its samples, and these


@dataclass(kw_only=True)
class Loop:
    """Runs one rank's training: iterating over it yields each Report and each EpochDone, equally on all ranks.

    All collectives run inside `next()`. Checkpoints and evaluations are therefore handled between two yielded items,
    and the caller's code in between affects its own rank only.
    """

    step: Step
    feed: Feed
    test: Split
    rate: Rate
    reports: Reports
    progress: Progress
    epochs: int
    test_sets: Mapping[str, range] | None = None  # of the test split, see `evaluate`
    max_steps: int | None = None  # of the run, replaces `epochs`
    hooks: Sequence[Hook] = ()
    points: SavePoints = NEVER
    watchdog: Watchdog = OFF
    bar: ProgressBar = no_bar
    agree: Callable[[], None] = lambda: None  # all ranks agree to continue after a yielded item; else EndOfRun
    is_stopped: Callable[[], bool] = lambda: False  # all ranks have agreed to finish: the epoch is the last and ends

    has_begun = False
    are_equal = True  # all replicas, at the last report

    def __iter__(self) -> Iterator[Report | EpochDone]:
        self.has_begun = True
        position, task = self.progress.position, self.step.task
        first_epoch, epochs = position.epoch, self.epochs
        if self.max_steps is not None:  # a resumed run may have had other ranks
            epochs = self.feed.epochs(position, self.max_steps)
        for hook in self.hooks:
            hook.begin_epochs(epochs)
        while position.epoch < epochs and (position.visited or not self.is_stopped()):
            began_s = time.perf_counter() - position.train_s
            for report in () if self.is_stopped() else self.steps(position):
                for hook in self.hooks:
                    hook.record(report)
                position = position_after(position, report, train_s=time.perf_counter() - began_s)
                self.progress.position = position
                yield report
                self.agree()
                if report.end is not None:
                    raise report.end
                self.act_on(report.decision, position)
            for hook in self.hooks:
                hook.epoch_trained(position.epoch + 1 - first_epoch)
            test = self.evaluate(position)
            done = EpochDone(
                epoch=position.epoch + 1,
                epochs=epochs,
                step=position.step,
                train=metrics_of(task, position.totals),
                test=test,
                lr=self._last_rate(position),
                samples=position.visited,
                train_s=position.train_s,
            )
            for hook in self.hooks:
                hook.epoch_tested(done, position)
            position = Position(step=position.step, epoch=done.epoch)
            self.progress.go_on(position)
            yield done
            self.agree()
        self.step.phases.close()
        for hook in self.hooks:
            hook.trained(position)

    def steps(self, start: Position) -> Iterator[Report]:
        """Train on the remaining samples of an epoch, each once; report when due, before a save, and at the end.

        The learning rate depends on the batch's size and the visited share of the epoch, so it does not matter whether
        the samples before `start` came in batches of another size. In a run of `max_steps` steps it depends on the step
        instead. At a limit, after step `max_steps` of the run, and if all ranks have agreed to finish, the epoch ends
        early.

        The result of a step is read during the next step, so that a GPU does not wait for the host. It is read
        immediately if a report, a checkpoint or a limit depends on it.
        """
        step, feed, when, phases, reports = self.step, self.feed, self.step.slots.when, self.step.phases, self.reports
        step.modes.restore()
        batches = feed.batches(start)
        if self.max_steps is not None:
            batches = batches[: max(0, self.max_steps - start.step)]
        visited, last = start.visited, start.step + len(batches)
        reports.restart()
        when.begin(start.epoch, start.step)
        self.points.begin(start.step)
        end_of_group: EndOfRun | None = None  # of the ranks that step together, until all are synchronized
        pending = deque[_PendingStep]()
        prefetched = feed.micro_batches(batches, start.epoch, self.watchdog)
        shown = self.bar(prefetched, title=f"epoch {start.epoch + 1}", total=len(batches))
        for number, (batch, micro_batches) in enumerate(shown, start=start.step + 1):
            self.watchdog.begin_step(number)
            for hook in self.hooks:
                hook.begin_step(number)
            phases.enter("other")
            is_synced = when.syncs_after(number, last=last)
            decision_of_all = self.points.decide(number) if is_synced else NEVER.decide(number)  # hidden by the step
            is_due = reports.is_due(number, last=last) or (is_synced and self.is_stopped())
            rate = self._rate_at(number, start.epoch + visited / len(feed.split), batch.global_size)
            in_flight = step(
                micro_batches,
                backward_passes=len(batch.indices),
                global_count=when.weight(batch.global_count, batch.group_count),
                lr=rate,
                measure=is_due,
            )
            count = sum(map(len, batch.indices)) / step.slots.comm.replica.size
            pending.append((number, count, batch.indices, in_flight))
            visited += batch.global_size
            self.progress.record_step(number, visited)
            phases.enter("other")
            decision = decision_of_all()
            while pending and (
                len(pending) > 1 or is_due or decision.is_any or decision.snapshot or self._needs_now(number)
            ):
                end = self._read(pending)
                end_of_group = end_of_group or end  # keep the first
            end = self._sync(number, end_of_group) if is_synced else None
            if is_due or end or decision.is_any:
                phases.enter("record")
                report = reports.report(
                    step=number,
                    lr=rate,
                    grad_norm=reports.window.grad_norm if is_due else None,
                    loss_scale=step.scaler.get_scale(),
                    visited=visited,
                    decision=decision,
                    end=end,
                )
                self.are_equal = is_synced
                yield report
                reports.restart()  # recording and saving do not count
            elif decision.snapshot:
                for hook in self.hooks:
                    hook.snapshot(self.progress.stopped(), reports.window.unreported())
            phases.end_step()
            if end or (is_synced and self.is_stopped()):
                return

    def evaluate(self, position: Position) -> dict[str, float]:
        """Return the metrics of the test split; after a stop request, save the run and raise EndOfRun."""
        metrics = evaluate(
            self.step,
            self.test,
            position.step,
            micro_batch=self.feed.sizes.micro_batch,
            sets=self.test_sets,
            save_points=self.points,
            watchdog=self.watchdog,
            bar=self.bar,
        )
        if metrics is None:
            self.act_on(LEAVE, position)
            raise AssertionError("no hook has ended the run")
        return metrics

    def act_on(self, decision: Decision, position: Position) -> None:
        """Act on the decision of all ranks; raise EndOfRun if they stop."""
        for hook in self.hooks:
            hook.act_on(decision, position)

    def _needs_now(self, number: int) -> bool:
        return any(hook.needs_now(number) for hook in self.hooks)

    def _rate_at(self, number: int, epochs_done: float, global_size: int) -> float:
        rate = self.rate
        return rate(number - 1 if rate.by_steps else epochs_done * self.feed.sizes.steps_per_epoch, global_size)

    def _last_rate(self, position: Position) -> float:
        """Return the learning rate of an epoch's last step."""
        rate, steps = self.rate, position.step
        if not rate.by_steps:
            epochs_done = position.epoch + position.visited / len(self.feed.split)
            steps = min(round(epochs_done * self.feed.sizes.steps_per_epoch), rate.total_steps)
        return rate(steps - 1, rate.batch)

    def _read(self, pending: deque[_PendingStep]) -> EndOfRun | None:
        """Read the result of the oldest pending step; return why the run ends with it, if it does."""
        number, count, samples, in_flight = pending[0]
        done = in_flight.read()
        pending.popleft()
        self.reports.add(number, done, count=count, samples=samples)
        try:
            for hook in self.hooks:
                hook.step_known(number, done)
        except EndOfRun as end:
            return end
        return None

    def _sync(self, number: int, end_of_group: EndOfRun | None) -> EndOfRun | None:
        """Make all ranks equal after a step; return why the run ends with it, if it does."""
        when = self.step.slots.when
        if when.is_apart:
            self.step.phases.enter("sync")
        end = when.sync(number, end_of_group)
        self.reports.window.waited_s += when.waited_s
        try:
            for hook in self.hooks:
                hook.synced(number)
        except EndOfRun as differ:
            return end or differ
        return end


def position_after(position: Position, report: Report, *, train_s: float) -> Position:
    """Return the position of the run after a report."""
    totals = added(position.totals, report.totals)
    return replace(position, step=report.step, visited=report.visited, totals=totals, train_s=train_s)
