"""Hooks that record and print a run's progress."""

from dataclasses import asdict

from hvdtrain.core.phases import Phases
from hvdtrain.core.position import Position
from hvdtrain.core.replicas import whole_hash
from hvdtrain.core.step import Step
from hvdtrain.core.task import Task
from hvdtrain.loop.hooks import EpochDone, Hook
from hvdtrain.loop.reports import Report
from hvdtrain.tracking.console import format_behind
from hvdtrain.tracking.run import Run


class Recorder(Hook):
    """Writes reports and epochs into the run folder, and prints them on rank 0."""

    def __init__(self, run: Run, task: Task) -> None:
        self._run, self._task = run, task

    def begin_epochs(self, epochs: int) -> None:
        self._run.tracker.result["epochs"] = epochs

    def record(self, report: Report) -> None:
        run = self._run
        run.tracker.add_counts(report.step, report.counts())
        if (power_w := report.power_w()) is not None:
            run.tracker.add_energy(power_w)
        if report.behind is not None:
            straggler = asdict(report.behind)
            run.tracker.record_straggler(straggler, f"step {report.step}: {format_behind(straggler)}")
        if run.tracker.is_writer:
            events = report.events()
            run.tracker.report(report.scalars(), metrics=report.metrics, event_lines=events)
            run.console.print_events(events)

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        metrics = self._run.tracker.record_epoch(
            done.epoch, count=done.samples, train_s=done.train_s, lr=done.lr, train=done.train, test=done.test
        )
        unit = self._task.unit
        self._run.console.print(
            f"epoch {done.epoch:>3}/{done.epochs}  train loss {metrics['train/loss']:.4f}  "
            f"test {self._task.format_metrics(done.test)}  "
            f"lr {metrics['train/lr']:.4g}  {metrics[f'train/{unit}_per_s']:.0f} {unit}/s"
        )


class Profiler(Hook):
    """Writes profiles of the steps."""

    def __init__(self, run: Run, phases: Phases) -> None:
        self._run, self._phases = run, phases

    def epoch_trained(self, count: int) -> None:
        self._run.write_profile(self._phases)

    def trained(self, position: Position) -> None:
        self._run.write_profile(self._phases, is_last=True)


class SentRecord(Hook):
    """Writes traffic.json: the data that a replica's ranks send per step, from which hvdlaunch maps ranks to GPUs."""

    def __init__(self, run: Run, step: Step, *, gradient_bytes: int) -> None:
        self._run, self._step, self._gradient_bytes = run, step, gradient_bytes

    def epoch_trained(self, count: int) -> None:
        exchanged, summed = self._step.slots.where.part.sent_bytes()
        part = {
            "exchanges": [{"part": other, "bytes": sent} for other, sent in exchanged.items()],
            "sums_bytes": summed,
            "gradient_bytes": self._gradient_bytes,
        }
        parts = self._step.slots.comm.replica.allgather(part)
        self._run.tracker.write_document("traffic.json", {"parts": parts})


class Conclusion(Hook):
    """Writes the result of a run that has completed all epochs."""

    def __init__(self, run: Run, step: Step) -> None:
        self._run, self._step = run, step

    def trained(self, position: Position) -> None:
        self._run.tracker.result["epochs"] = position.epoch  # fewer if the program has finished early
        line = f"test {self._step.task.format_metrics(self._run.tracker.last_test)}"
        self._run.conclude(line, weights_sha256=whole_hash(self._step.slots.comm, self._step.model))
