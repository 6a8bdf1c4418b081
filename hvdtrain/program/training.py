"""A training that is ready to run, and its interface for the program."""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from hvdtrain.checkpoint.run_folder import RunFolder
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.checkpoint.snapshots import open_on_all
from hvdtrain.core.model.modes import outermost_in_eval
from hvdtrain.core.position import Position
from hvdtrain.core.random_state import seed_generators
from hvdtrain.insight.profiling.step_clock import step_clock
from hvdtrain.insight.tracking.environment import without_secrets
from hvdtrain.insight.tracking.gauges import open_gauges
from hvdtrain.insight.tracking.recorder import Conclusion, Profiler, Recorder, SentRecord
from hvdtrain.insight.tracking.run import TrackedRun as Record
from hvdtrain.insight.tracking.run import open_run
from hvdtrain.loop.draft import Job
from hvdtrain.loop.feed.feed import Feed, Split
from hvdtrain.loop.feed.order import batch_sizes
from hvdtrain.loop.hooks import EpochDone, Hook
from hvdtrain.loop.limits import Limits
from hvdtrain.loop.loop import Loop
from hvdtrain.loop.own_state import OwnState
from hvdtrain.loop.progress import Progress
from hvdtrain.loop.reports import Report, Reports
from hvdtrain.loop.save_points import LEAVE
from hvdtrain.loop.stragglers import OwnTime
from hvdtrain.loop.witnesses.injected import injected_faults
from hvdtrain.program import assembly
from hvdtrain.program.checks import open_folder, require_job
from hvdtrain.program.fit import Room, Trial, long_epoch, most_that_fit, passes_for
from hvdtrain.program.own_log import OwnLog
from hvdtrain.program.settings import Settings, compared
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.device import set_trials_of_kernels
from hvdtrain.recipe.average import limit_statistics
from hvdtrain.settings.safety import life, watchdog
from hvdtrain.settings.safety.exits import BAD_INPUT, FAILED, EndOfRun


class Training:
    """A training loop: iterating over it trains, and yields each Report and each EpochDone on all ranks.

    The body of the `for` acts on its own rank only: collectives, checkpoints and evaluations are handled between two
    yielded items. A `break` or `sys.exit(0)` on all ranks saves and ends the run; on some ranks it ends the run with
    status 1. An end that the program catches is raised again when the program ends. `stop` finishes the run early.

    >>> training = run.training(model, Squares(), train=samples, test=samples[:2], cuts=cuts)
    data: default, 8 samples to train on, 2 to test with
    ...
    run folder: runs/example/a
    ...
    >>> report, done = training
    epoch   1/1  train loss ...
    finished: test loss ...
    >>> training
    Training(runs/example/a, step 4)
    """

    _is_finished = False

    def __init__(
        self,
        settings: Settings,
        job: Job,
        test: Split,
        enter: Callable[[AbstractContextManager[Record]], Record],
        *,
        about: Mapping[str, Any],
        at_end: Callable[["Training"], object] | None = None,
    ) -> None:
        """Build the training; `enter` keeps the record of the run open until the program ends.

        `about` is added to config.json. The order of the phases matters; a comment at each gives the reason.
        """
        self._settings, self._comm = settings, job.comm
        life.doing("preparing the first step")
        self._chosen: dict[str, Any] = {}  # set by this program, for checkpoints
        parameters = sum(parameter.numel() for parameter in job.model.parameters())  # before features split the model
        set_trials_of_kernels(deterministic=settings.deterministic, steps=job.steps)
        # Features reject a job before its folder is created; the folder exists before Horovod starts, for its timeline.
        agree(job.comm, lambda: require_job(settings, job))
        folder = open_folder(settings, job)
        self._record = enter(self._opened(folder))
        # The clock needs the record's watchdog; stages need the clock and the cuts from the checkpoint.
        job = self._with_folder(job, folder)
        rate = assembly.rate_of(settings, job)
        self.step = step = assembly.build_step(settings, job, assembly.place(settings, job), lr=rate.peak)
        settings, job = self._fitted(job)
        self._settings = settings
        limit_statistics(job.model, passes=job.steps * settings.accumulate_steps)
        reports = self._reports(job)
        limits = self._limits(job)
        # Dropout must differ between ranks, and rank 0 may have drawn more numbers to measure the model.
        seed_generators((settings.seed << 16) + step.slots.where.part.stream(job.comm))
        self._own = OwnState()
        state = assembly.state_of(step, limits, reports, seed=settings.seed, own=self._own)
        feed = Feed(job.train, job.task, job.comm, job.sizes, seed=settings.seed, device=job.device, phases=job.phases)
        # The checkpoint replaces the random state.
        resumed = folder.resume_from
        position = Position() if resumed is None else feed.align(resume(state, resumed, apart=folder.apart))
        if folder.went_back:  # and trains on, also where it had finished early
            self._own.stopped = None
        derived = assembly.derive(
            settings, job, step.slots.where, test_samples=len(test), parameters=parameters, peak_lr=rate.peak
        )
        self._begin(folder, position, job, about=derived | dict(about))
        # The hooks below read counts of the record, which `begin` has restored.
        points = assembly.make_save_points(settings, job.comm, self._record.stop_requested)
        snapshots = open_on_all(job.comm)
        points.snapshot_due = None if snapshots is None else snapshots.is_due
        saves = Saves(
            step,
            state,
            folder,
            self._record,
            points,
            keep=settings.keep,
            snapshots=snapshots,
            **self._chosen,
        )
        progress = Progress(position)
        hooks: list[Hook] = [
            limits,
            saves,
            Profiler(self._record, job.phases),
            SentRecord(self._record, step, gradient_bytes=assembly.gradient_bytes(settings, job)),
            *injected_faults(self._record.faults, step),
            *assembly.tuning_hooks(settings, job, batch=rate.batch),
            Recorder(self._record),
            *([] if at_end is None else [assembly.AtEnd(lambda: self._call_at_end(at_end))]),
            Conclusion(self._record, step),
        ]
        self._record.console.follow(progress, reports, unit=job.task.unit)
        self._own_log = OwnLog(self._record, self._own, lambda: progress.position.step)
        self._end: Exception | None = None  # why the loop has ended before its end
        self._loop = Loop(
            step=step,
            feed=feed,
            test=test,
            test_sets=job.test_sets,
            rate=rate,
            reports=reports,
            progress=progress,
            epochs=settings.epochs,
            max_steps=None if job.length_option == "--epochs" else job.steps,
            hooks=hooks,
            points=points,
            watchdog=self._record.watch,
            bar=self._record.console.progress_bar,
            agree=lambda: self._agree(continues=True),
            is_stopped=lambda: self._own.stopped is not None,
        )

    def __repr__(self) -> str:
        return f"Training({self.folder}, step {self._loop.progress.position.step})"

    def __iter__(self) -> Iterator[Report | EpochDone]:
        if self._is_finished:
            return
        self.require_end()
        try:
            events = iter(self._loop)
            for event in events:
                try:
                    yield event
                except GeneratorExit:  # the body of the `for` has ended it
                    self._leave(events)
                    raise
                self.require_end()  # another `for` over this training has ended it
            self._is_finished = True
        except Exception as error:  # remembered: the program may catch it
            self._end = error
            raise

    def _leave(self, events: Iterator[Report | EpochDone]) -> None:
        """Finish if the program has called `stop`, else agree to leave.

        The reason is raised at the end, since Python ignores what a closed generator raises.
        """
        try:
            if self._own.request is None:
                self._agree(continues=False)
                self._record.stop_requested.set()  # it returns in the middle of a round, at whose end the run saves
            for _ in events:
                pass
            self._is_finished = True
        except Exception as error:  # noqa: BLE001
            self._end = error

    def say(self, *lines: str) -> None:
        """Print lines to the user, on rank 0."""
        self._record.console.print(*lines)

    @property
    def folder(self) -> Path:
        """The run folder; ranks of other hosts see it if hosts share it."""
        return self._record.folder

    @property
    def state(self) -> dict[str, Any]:
        """Values of the program that checkpoints save and restore: numbers, texts, lists, dicts and tensors.

        Set them on all ranks alike: rank 0's are saved, and all ranks get them back. Tensors come back on the host.
        """
        return self._own.values

    def stop(self, reason: str) -> None:
        """Finish the run after this item of the loop, on all ranks if any rank calls it, with the exit reason finished.

        An epoch that has begun ends here, with a test. `reason` is printed, and written into result.json.
        """
        self._own.request = " ".join(str(reason).split()) or "no reason given"

    def log(self, name: str, value: float) -> None:
        """Record a number at the current step, for TensorBoard and metrics.jsonl; rank 0 writes.

        Call it in the loop or in `at_end`. A name has one value for each step.
        """
        self._own_log.number(name, value)

    def log_image(self, name: str, image: Any) -> None:
        """Record a picture at the current step, for TensorBoard; metrics.jsonl names it. Rank 0 writes.

        `image` is a figure of matplotlib, an image of PIL, or a tensor or an array, (H, W), (C, H, W) or (H, W, C) with
        1 or 3 channels, of floats from 0 to 1, bools, or uint8.
        """
        self._own_log.image(name, image)

    def gather_model(self) -> dict[str, torch.Tensor]:
        """Return the whole evaluated model's state dict on rank 0, and an empty dict on other ranks; a collective."""
        return self.step.slots.where.part.gather_full(self._comm, self.step.evaluated)

    def require_end(self) -> None:
        """Raise again what has ended the loop before its end, even if the program has caught it."""
        if self._end is not None:
            raise self._end

    @property
    def has_begun(self) -> bool:
        """Whether a loop over this training has begun."""
        return self._loop.has_begun

    def _agree(self, *, continues: bool) -> None:
        """Return if all ranks continue; raise EndOfRun if all or only some of them leave, or made a mistake."""
        own = self._own
        answers, problems, requests = zip(
            *self._comm.allgather([continues, own.find_problem(), own.request]), strict=True
        )
        if problem := next(filter(None, problems), None):
            raise EndOfRun(problem, status=BAD_INPUT, reason="failed")
        if all(answers):
            self._finish_early(next(filter(None, requests), None))
            return
        if any(answers):
            left = ", ".join(str(rank) for rank, continues in enumerate(answers) if not continues)
            raise EndOfRun(
                f"the loop over the training was left on rank {left} while other ranks continue. Leave it on all "
                "ranks, by a condition that is the same on all of them.",
                status=FAILED,
                reason="left by some ranks",
            )
        if self._loop.are_equal:
            self._loop.act_on(LEAVE, self._loop.progress.position)

    def _call_at_end(self, at_end: Callable[["Training"], object]) -> None:
        at_end(self)
        self._agree(continues=True)

    def _finish_early(self, reason: str | None) -> None:
        """Let the loop of all ranks end, once, if there is a reason."""
        if reason is None or self._own.stopped is not None:
            return
        self._own.stopped = self._record.tracker.result["stopped"] = reason
        self.say(f"finishing after step {self._loop.progress.position.step}: {reason}")

    def _opened(self, folder: RunFolder) -> AbstractContextManager[Record]:
        settings, timeout_s = self._settings, self._settings.hang_timeout_s
        if timeout_s is None and self._comm.size == 1 and sys.stdin is not None and sys.stdin.isatty():
            timeout_s = 0.0  # a debugger is attached, or a person watches
        return open_run(
            self._comm,
            folder.path,
            hang_timeout_s=timeout_s,
            # A step may compile again; a group that steps on its own waits for many steps of a slower one.
            min_limit_s=watchdog.SLOW_S if settings.compile or settings.rounds else watchdog.MIN_LIMIT_S,
            timeline=settings.profile == "timeline",
        )

    def _with_folder(self, job: Job, folder: RunFolder) -> Job:
        watch = self._record.watch
        clock = step_clock(self._settings, folder.path, job.comm, job.device, watchdog=watch, readers=job.train.readers)
        self._own_time = OwnTime(clock, job.device)
        resumed = {} if folder.resume_from is None else folder.resume_from.metadata
        return replace(job, phases=self._own_time, is_shared=job.comm.rank not in folder.apart, resumed=resumed)

    def _fitted(self, job: Job) -> tuple[Settings, Job]:
        """Set the batch size that fits into the memory of all ranks, or the one that the run began with."""
        settings = self._settings
        if settings.batch_size_per_rank == "auto":
            most = job.resumed.get("micro_batch")
            if most is None:
                trial = Trial(self.step, job, Room(job.comm, is_host=job.device.type == "cpu"))
                most = most_that_fit(job.comm, job.sizes.micro_batch, trial.fits)
            share = job.sizes.micro_batch * settings.accumulate_steps
            settings = replace(settings, accumulate_steps=passes_for(share, most))
            sizes = batch_sizes(settings, samples=len(job.train), ranks=job.comm.data.size)
            job = replace(job, sizes=sizes)
            self._chosen = {"micro_batch": sizes.micro_batch}
        return settings, job

    def _reports(self, job: Job) -> Reports:
        return Reports(
            job.comm,
            open_gauges(job.comm, job.device),
            job.task,
            every_steps=self._settings.report_every_steps,
            device=job.device,
            own_time=self._own_time,
        )

    def _limits(self, job: Job) -> Limits:
        most = job.task.max_unreadable
        return Limits(
            self.step,
            max_skipped_steps=self._settings.max_skipped_steps,
            check_replicas_every=self._settings.check_replicas_every,
            most={} if most is None else {f"unreadable_{job.task.unit}": most},
            counts=lambda: self._record.tracker.result,
            hint="pass --find-nan to learn whose",
        )

    def _begin(self, folder: RunFolder, position: Position, job: Job, *, about: dict[str, Any]) -> None:
        """Record and print what is known before the first step."""
        resumed, record = folder.resume_from, self._record
        record.start(
            without_secrets(asdict(self._settings)) | {"workers": job.train.readers},
            about,
            device=job.device,
            columns=compared(type(self._settings)),
            task=job.task,
            memory=None if resumed is None else {"position": asdict(position), **resumed.metadata["tracker"]},
        )
        record.tracker.result["stopped"] = self._own.stopped
        if resumed is not None:
            record.console.print(f"resumed from {resumed.folder}, epoch {position.epoch + 1}", *folder.changes)
        if layout := self.step.slots.where.describe():
            record.console.print(layout)
        if names := outermost_in_eval(job.model):
            in_eval = f"{', '.join(names)}: in eval mode, and stays so. To train a module whole, call its train()."
            record.console.print_message("note", in_eval)
        if resumed is None and (forecast := long_epoch(self._settings, job, self.step)):
            record.console.print_message("note", forecast)
