"""Hooks that record and print a run's progress."""

from hvdtrain.core.phases import Phases
from hvdtrain.core.position import Position
from hvdtrain.core.replicas import whole_hash
from hvdtrain.core.step import Step
from hvdtrain.insight.profiling import picture
from hvdtrain.insight.profiling.profile import Profile, gather_profile
from hvdtrain.insight.profiling.verdict import REMEDIES
from hvdtrain.insight.tracking.run import TrackedRun
from hvdtrain.loop.hooks import EpochDone, Hook
from hvdtrain.loop.reports import Report
from hvdtrain.settings.safety import exits, output


class Recorder(Hook):
    """Writes reports and epochs into the run folder, and prints them on rank 0."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run

    def begin_epochs(self, epochs: int) -> None:
        self._run.tracker.result["epochs"] = epochs

    def record(self, report: Report) -> None:
        self._run.tracker.record(report)
        self._run.console.print_events(report.events())

    def epoch_tested(self, done: EpochDone, position: Position) -> None:
        metrics, task = self._run.tracker.record_epoch(done), self._run.tracker.task
        self._run.console.print(
            f"epoch {done.epoch:>3}/{done.epochs}  train loss {metrics['train/loss']:.4f}  "
            f"test {task.format_metrics(done.test)}  "
            f"lr {metrics['train/lr']:.4g}  {metrics[f'train/{task.unit}_per_s']:.0f} {task.unit}/s"
        )


class Profiler(Hook):
    """Writes what the clocks of all ranks have measured so far, and at the end a picture and the verdict."""

    def __init__(self, run: TrackedRun, phases: Phases) -> None:
        self._run, self._phases = run, phases

    def epoch_trained(self, count: int) -> None:
        self._write()

    def trained(self, position: Position) -> None:
        profile, run = self._write(), self._run
        if profile is not None and run.comm.rank == 0:
            run.tracker.write_picture("phases", picture.draw(profile))
            run.tracker.write_text("phases", "\n".join(profile.lines()))
            run.console.print(*profile.lines())

    def _write(self) -> Profile | None:
        run = self._run
        profile = gather_profile(run.comm, self._phases, {**REMEDIES, **run.tracker.task.remedies})
        if profile is not None:
            run.tracker.result["profile"] = profile.summary()
            run.tracker.write_document("phases.json", profile.document())
        return profile


class SentRecord(Hook):
    """Writes traffic.json: the data that a replica's ranks send per step, from which hvdlaunch maps ranks to GPUs."""

    def __init__(self, run: TrackedRun, step: Step, *, gradient_bytes: int) -> None:
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
    """Completes the run after all epochs: each rank's last facts, the result, and the last line."""

    def __init__(self, run: TrackedRun, step: Step) -> None:
        self._run, self._step = run, step

    def trained(self, position: Position) -> None:
        run, result, task = self._run, self._run.tracker.result, self._step.task
        result["epochs"] = position.epoch  # fewer if the program has finished early
        weights_sha256 = whole_hash(self._step.slots.comm, self._step.model)
        run.end(exits.FINISHED, weights_sha256=weights_sha256)
        if run.comm.rank == 0:
            epochs = f"{position.epoch} epoch{'s' if position.epoch != 1 else ''}"
            ranks = f"{run.comm.size} rank{'s' if run.comm.size > 1 else ''}"
            speed = f"{result[f'train_{task.unit}_per_s']:.0f} {task.unit}/s"
            test = {name.removeprefix("eval_"): value for name, value in result.items() if name.startswith("eval_")}
            output.print_line(
                f"finished: test {task.format_metrics(test)} after {epochs} on {ranks}, "
                f"{result['wall_time_s']:.0f} s, {speed}; {run.folder}"
            )
        run.is_concluded = True
