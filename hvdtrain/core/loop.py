"""One epoch of training, recorded and saved, and one evaluation shared by all ranks."""

import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.save_points import NEVER, SavePoints
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.checkpoint.state import State
from hvdtrain.core.feed import Feed, Split, arriving
from hvdtrain.core.finite import Skipped, SpikeWatch
from hvdtrain.core.order import BatchSizes
from hvdtrain.core.reports import Report, Reports, Window
from hvdtrain.core.step import Pending, TrainingStep
from hvdtrain.core.task import Task, Totals, added, total
from hvdtrain.elastic.progress import Progress, Unreported
from hvdtrain.elastic.recovery import Grows
from hvdtrain.ranks import replicas
from hvdtrain.ranks.comm import Comm, Members
from hvdtrain.recipe import batch_norm
from hvdtrain.recipe.schedule import LearningRate
from hvdtrain.safety.exits import FAILED, TOO_MANY_SKIPPED, EndOfRun
from hvdtrain.safety.faults import NONE, Faults
from hvdtrain.safety.watchdog import OFF, Watchdog
from hvdtrain.tracking.console import SILENT, Console
from hvdtrain.tracking.run import Run
from hvdtrain.tracking.tracker import Measures


class Limits:
    """What ends a run: too many skipped steps in a row, replicas that differ."""

    def __init__(
        self, *, max_skipped_steps: int, check_replicas_every: int, most: Mapping[str, int] | None = None
    ) -> None:
        """`most` are counts of the result that may not be exceeded, as unreadable_images."""
        self._max_skipped_steps = max_skipped_steps
        self._check_replicas_every = check_replicas_every
        self._check_all = False  # where all ranks meet next
        self._most = most or {}
        self.skipped_in_a_row = 0

    def after_step(self, comm: Comm, together: Members, model: nn.Module, step: int, skipped: Skipped | None) -> None:
        """Raise EndOfRun where a limit is reached after step 1, 2, ..., on all ranks that step together."""
        is_checked = bool(self._check_replicas_every) and step % self._check_replicas_every == 0
        self._check_all |= is_checked and together.size < comm.size  # of all groups, also of one that ends here
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if skipped else 0
        if skipped and self.skipped_in_a_row >= self._max_skipped_steps:
            look = "give --find-nan to know whose" if skipped.rank is None else "look at that rank's data"
            raise EndOfRun(
                f"{self.skipped_in_a_row} steps in a row were not finite, up to step {step}; {skipped.what} first: "
                f"lower --lr, set --clip-norm, or {look}",
                status=TOO_MANY_SKIPPED,
                reason="too many skipped steps",
            )
        if is_checked:
            replicas.check_replicas(comm, model, step, together=together)

    def after_meeting(self, comm: Comm, model: nn.Module, step: int) -> None:
        """Raise EndOfRun, on all ranks, where groups that have met are not equal again."""
        if self._check_all:
            replicas.check_replicas(comm, model, step)
        self._check_all = False

    def look_at_once(self, step: int) -> bool:
        """Whether this step must be read before the next one is begun."""
        last_chance = self.skipped_in_a_row + 1 >= self._max_skipped_steps
        return last_chance or bool(self._check_replicas_every and step % self._check_replicas_every == 0)

    def after_report(self, counts: Mapping[str, Any]) -> None:
        """Raise EndOfRun, on all ranks, where more samples could not be read than may be."""
        for name, most in self._most.items():
            if counts[name] > most:
                unit = name.removeprefix("unreadable_")
                raise EndOfRun(
                    f"{counts[name]} {unit} could not be decoded, more than --max-{name.replace('_', '-')} {most}: "
                    "repair the data; each rank has named its first on standard error",
                    status=FAILED,
                    reason=f"too many unreadable {unit}",
                )

    def state_dict(self) -> dict[str, Any]:
        """The steps skipped in a row, for a checkpoint."""
        return {"skipped_in_a_row": self.skipped_in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.skipped_in_a_row = state["skipped_in_a_row"]


def state_of(step: TrainingStep, limits: Limits, reports: Reports, *, seed: int) -> State:
    """The parts of a training that a checkpoint holds."""
    return State(
        comm=step.comm,
        device=step.device,
        seed=seed,
        model=step.model,
        average=step.average,
        optimizer=step.optimizer,
        shared={"scaler": step.scaler, "limits": limits},
        own={"spikes": reports.spikes, "sync": step.sync},
        stages_at=() if step.part is None else step.part.starts[1:],
    )


def measures_of(task: Task) -> Measures:
    """What the tracker must know of a task."""
    return Measures(
        unit=task.unit,
        metrics=tuple(task.metrics({})),
        best_metric=task.best,
        higher_is_better=task.higher_is_better,
        remedies=task.remedies,
    )


def train_epoch(
    step: TrainingStep,
    feed: Feed,
    start: Position,
    *,
    lr: LearningRate,
    limits: Limits,
    reports: Reports,
    max_steps: int | None = None,
    save_points: SavePoints = NEVER,
    watchdog: Watchdog = OFF,
    faults: Faults = NONE,
    progress: Progress | None = None,
    console: Console = SILENT,
) -> Iterator[Report]:
    """Visit each training sample once that is left of an epoch; report at report and save points and at the end.

    The learning rate follows the batch's size and the share of the epoch that was visited, so that it does not mind if
    the samples before `start` came in batches of another size; that of a run of so many steps follows these. At a
    limit, and after step `max_steps` of the run, the epoch ends early.

    What became of a step is read while the next one is under way, so that a GPU does not wait for the host, or at once
    where a report, a checkpoint or a limit depends on it. `progress` is kept up to date for whoever goes on from there.
    """
    phases = step.phases
    step.model.train()
    batches = feed.batches(start)
    if max_steps is not None:
        batches = batches[: max(0, max_steps - start.step)]
    visited, last = start.visited, start.step + len(batches)
    window = Window()
    step.rounds.begin(start.epoch, start.step)
    ends: EndOfRun | None = None  # for the ranks that step together, until all meet
    pending: deque[tuple[int, float, Pending]] = deque()
    progress = progress or Progress(start)
    progress.unreported = lambda: _unreported(window, pending)
    coming = feed.inputs(batches, start.epoch, watchdog)
    shown = console.progress(coming, what=f"epoch {start.epoch + 1}", total=len(batches))
    for number, (batch, inputs) in enumerate(shown, start=start.step + 1):
        watchdog.working(number)
        faults.at("step", number, model=step.model)
        phases.enter("other")
        meets = step.rounds.meets(number, last=last)
        decided = save_points.decide(number) if meets else NEVER.decide(number)
        step.poisoned = faults.poisons_loss(number)
        is_due = reports.is_due(number, last=last)
        epochs_done = start.epoch + visited / len(feed.split)
        rate = lr(number - 1 if lr.by_steps else epochs_done * feed.sizes.steps_per_epoch, batch.global_size)
        taken = step(
            inputs,
            backward_passes=len(batch.micro_batches),
            global_count=batch.near_count if step.rounds.apart else batch.global_count,
            lr=rate,
            measure=is_due,
        )
        pending.append((number, sum(map(len, batch.micro_batches)) / step.comm.replica.size, taken))
        visited += batch.global_size
        progress.took(number, visited)
        phases.enter("other")
        decision = decided()
        while pending and (len(pending) > 1 or is_due or decision.save or decision.grow or limits.look_at_once(number)):
            end = _read(pending, step=step, window=window, limits=limits, spikes=reports.spikes)
            ends = ends or end
        end = None
        if meets:
            if step.rounds.apart:
                phases.enter("sync")
            end = _meet(number, ends, step=step, limits=limits)
            window.waited_s += step.rounds.waited_s
        if is_due or end or decision.save or decision.grow:
            phases.enter("record")
            report = reports.report(
                window,
                step=number,
                lr=rate,
                grad_norm=window.grad_norm if is_due else None,
                loss_scale=step.scaler.get_scale(),
                visited=visited,
                decision=decision,
                end=end,
            )
            window = Window()  # now: whoever goes on after a loss in what follows counts these steps once
            yield report
            window = Window()  # with a clock that begins after what was recorded and saved
        phases.step_done()
        if end:
            return


def _read(
    pending: deque[tuple[int, float, Pending]],
    *,
    step: TrainingStep,
    window: Window,
    limits: Limits,
    spikes: SpikeWatch,
) -> EndOfRun | None:
    """Take in what became of the first of these steps; why the run ends with it, if it does."""
    number, count, taken = pending[0]
    done = taken.read()
    pending.popleft()  # not before: where a rank is lost while they tell each other, the step is still to be counted
    window.add(number, done, count=count)
    if not done.skipped and done.totals["count"]:
        spike = spikes.see(number, done.totals["loss"] / done.totals["count"])
        window.spikes += [spike] if spike else []
    try:
        limits.after_step(step.comm, step.together, step.model, number, done.skipped)
    except EndOfRun as end:
        return end
    return None


def _meet(number: int, ends: EndOfRun | None, *, step: TrainingStep, limits: Limits) -> EndOfRun | None:
    """All ranks become equal after a step; why the run ends with it, if it does."""
    end = step.rounds.meet(number, ends)
    try:
        limits.after_meeting(step.comm, step.model, number)
    except EndOfRun as differ:
        return end or differ
    return end


def _unreported(window: Window, pending: deque[tuple[int, float, Pending]]) -> Unreported:
    """What this rank knows of the steps of a window, with those that it has not looked at yet."""
    while pending:
        number, count, taken = pending.popleft()
        window.add(number, taken.read_alone(), count=count)
    return window.unreported()


def after(position: Position, report: Report, *, train_s: float) -> Position:
    """Where the run stands after a report."""
    totals = added(position.totals, report.totals)
    return replace(position, step=report.step, visited=report.visited, totals=totals, train_s=train_s)


@torch.no_grad()
def evaluate(
    step: TrainingStep,
    split: Split,
    number: int,
    *,
    micro_batch: int,
    save_points: SavePoints = NEVER,
    watchdog: Watchdog = OFF,
    console: Console = SILENT,
) -> dict[str, float] | None:
    """The task's metrics on a split after step `number`; None where the ranks were asked to leave.

    Each sample is on exactly one rank. The ranks' batch-norm statistics are averaged first, so that all of them
    evaluate the same model.
    """
    model, task, group = step.evaluated, step.task, step.comm.data
    model.eval()
    statistics = batch_norm.running_statistics(model)
    own = [buffer.clone() for buffer in statistics]
    group.average_(statistics)
    mine = torch.arange(len(split))[group.rank :: group.size]
    parts = mine.split(micro_batch)  # an empty one where there is nothing for this rank
    batches_of_all = math.ceil(len(split) // group.size / micro_batch)  # a rank may have one more
    done = []
    batches = arriving(split, parts, step.device, None, watchdog=watchdog)
    for place, (samples, raw) in enumerate(console.progress(batches, what="test", total=len(parts))):
        watchdog.evaluating(number)
        if place < batches_of_all and save_points.decide(number)().leave:
            for buffer, before in zip(statistics, own, strict=True):  # there may be none: no foreach function
                buffer.copy_(before)
            return None
        done += step.evaluation(model, task.prepare(raw, samples, None))
    sums: Totals = {}
    if done:
        names, values = total(done)
        sums = dict(zip(names, group.allreduce(values).tolist(), strict=True))
    return task.metrics(step.comm.replica.allgather(sums)[-1])


def follow(
    reports: Iterable[Report],
    position: Position,
    *,
    limits: Limits,
    saves: Saves,
    save_points: SavePoints,
    run: Run,
    progress: Progress | None = None,
) -> Position:
    """Go through an epoch, recording its reports and saving where all ranks have decided so: where the run then stands.

    Raises EndOfRun on all ranks at a limit, and where they leave.
    """
    started = time.perf_counter() - position.train_s
    for report in reports:
        run.tracker.count(report.step, report.counts())
        if run.tracker.writes:
            happened = report.events()
            run.tracker.report(report.scalars(), happened=happened)
            run.console.events(happened)
        position = after(position, report, train_s=time.perf_counter() - started)
        if progress is not None:
            progress.told(position)
        if report.end is not None:
            raise report.end
        limits.after_report(run.tracker.result)
        if report.decision.save:
            run.watch.saving(position.step)
            saves.save(position)
            save_points.saved()
        if report.decision.leave:
            saves.leave(position, run=run.folder.name)
        if report.decision.grow:
            raise Grows
    return position


def evaluate_or_leave(
    step: TrainingStep,
    split: Split,
    position: Position,
    *,
    sizes: BatchSizes,
    saves: Saves,
    save_points: SavePoints,
    run: Run,
) -> dict[str, float]:
    """The metrics of a split where the run stands; EndOfRun, once it is saved, where the ranks were asked to leave."""
    metrics = evaluate(
        step,
        split,
        position.step,
        micro_batch=sizes.micro_batch,
        save_points=save_points,
        watchdog=run.watch,
        console=run.console,
    )
    run.watch.saving(position.step)
    if metrics is None:
        saves.save(position)
        saves.leave(position, run=run.folder.name)
    return metrics


def end_epoch(
    step: TrainingStep,
    split: Split,
    position: Position,
    *,
    epochs: int,
    lr: LearningRate,
    sizes: BatchSizes,
    saves: Saves,
    save_points: SavePoints,
    run: Run,
) -> Position:
    """Evaluate what an epoch, of so many, has trained, keep the best weights and record it: where the next one begins.

    EndOfRun, once it is saved, where the ranks were asked to leave.
    """
    task, epoch = step.task, position.epoch + 1
    test = evaluate_or_leave(step, split, position, sizes=sizes, saves=saves, save_points=save_points, run=run)
    if run.tracker.is_best(test):
        saves.save_best(position, step.evaluated, **{f"eval_{task.best}": test[task.best]})
    steps = position.step if lr.by_steps else min(epoch * sizes.steps_per_epoch, lr.total_steps)
    # Last, since a rank may be lost in all that comes before: then the others do all of it again.
    metrics = run.tracker.epoch_done(
        epoch,
        count=position.visited,
        train_s=position.train_s,
        lr=lr(steps - 1, lr.batch),
        train=task.metrics(position.totals),
        test=test,
    )
    run.console.say(
        f"epoch {epoch:>3}/{epochs}  train loss {metrics['train/loss']:.4f}  test {task.in_words(test)}  "
        f"lr {metrics['train/lr']:.4g}  {metrics[f'train/{task.unit}_per_s']:.0f} {task.unit}/s"
    )
    return Position(step=position.step, epoch=epoch)
