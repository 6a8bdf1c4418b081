"""Train an EfficientNet with Horovod.

    python -m hvdtrain.effnet --data digits --model efficientnet_tiny        one process, no MPI needed
    horovodrun -np 8 python -m hvdtrain.effnet                               one host, CIFAR-10
    mpirun -np 8 python -m hvdtrain.effnet                                   the same by mpirun
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.effnet         two hosts, the best GPUs of each

The result lies in runs/effnet/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

import os
import sys
import time
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import nn
from tqdm import tqdm

from hvdtrain.checkpoint.save_points import AgreedSavePoints, SavePoints
from hvdtrain.checkpoint.saves import Saves, resume
from hvdtrain.ranks.comm import Comm, agreed, require_own_device
from hvdtrain.record import tracker as tracking
from hvdtrain.record.console import say, show, show_events
from hvdtrain.record.description import describe_run
from hvdtrain.safety import exits, watchdog
from hvdtrain.safety.exits import EndOfRun
from hvdtrain.safety.faults import Faults
from hvdtrain.safety.watchdog import Watchdog
from hvdtrain.timing import picture as phase_picture
from hvdtrain.timing.phases import Phases
from hvdtrain.timing.verdict import Profile, over_ranks
from hvdtrain.train.divergence import parameter_hashes, weights_hash
from hvdtrain.train.loop import Position
from hvdtrain.train.preflight import build_model, join_ranks, load_images, make_run_folder, usable_device
from hvdtrain.train.training import Training, assemble, step_clock


def main() -> None:
    """One rank, from its command line to its result."""
    comm, config = join_ranks()
    device = agreed(comm, lambda: usable_device(comm, config.precision))
    require_own_device(comm, device)
    images = load_images(comm, config)
    model = build_model(comm, config, images.classes)
    folder = make_run_folder(comm, config, training_images=len(images.train))
    errors = folder.path / "ranks" / f"rank-{comm.rank}.err"
    watch = watchdog.watch(folder.path, comm.rank, hang_timeout_s=config.hang_timeout_s)
    watch.starting()
    comm.waiting = watch.collective

    faults = agreed(comm, lambda: Faults.parse(os.environ, comm.rank))
    if comm.rank == 0 and faults.announcement:
        print(faults.announcement, file=sys.stderr, flush=True)
    comm.start(timeline=folder.path / "timeline.json" if config.timeline else None)
    phases = step_clock(comm, config, folder.path, device)
    training = assemble(comm, config, images, model, device, phases=phases)
    torch.manual_seed((config.seed << 16) + comm.rank)  # dropout differs between ranks
    position, changes, found = Position(), list[str](), folder.resume_from
    if found is not None:
        position, changes = resume(comm, training, found)
    tracker = describe_run(
        comm, config, folder.path, device, training, memory=found.about["tracker"] if found is not None else None
    )
    asked = exits.on_early_end(errors, tracker.conclude, step=lambda: watch.step)
    saves = Saves(
        comm,
        training,
        tracker,
        folder.path / "checkpoints",
        keep=config.keep,
        newest=None if found is None else found.step,
        faults=faults,
    )
    points = AgreedSavePoints(comm, asked, every_s=config.checkpoint_every_s, every_steps=config.checkpoint_every_steps)
    bar = tqdm(
        total=config.epochs, initial=position.epoch, unit="epoch", disable=comm.rank != 0 or not sys.stderr.isatty()
    )
    if found is not None:
        for line in (f"resumed from {found.folder}, epoch {position.epoch + 1}", *changes):
            say(comm, bar, line)
    comm.gather("ready")  # every rank obeys SIGUSR1 now
    if comm.rank == 0:
        exits.report(saves="yes")
    faults.at("start")
    try:
        train(
            comm, training, position, tracker=tracker, saves=saves, points=points, watch=watch, faults=faults, bar=bar
        )
    except EndOfRun as end:
        tracker.conclude(end.reason)
        watch.close()
        raise
    bar.close()
    conclude(comm, tracker, model)
    watch.close()


def train(
    comm: Comm,
    training: Training,
    position: Position,
    *,
    tracker: tracking.Tracker,
    saves: Saves,
    points: SavePoints,
    watch: Watchdog,
    faults: Faults,
    bar: "tqdm[Any]",
) -> None:
    """From where the run stands to its end, with a checkpoint there; EndOfRun where all ranks leave before."""
    config, phases, first_epoch = training.config, training.step.phases, position.epoch
    for epoch in range(first_epoch, config.epochs):
        started = time.perf_counter() - position.train_s
        for report in training.epoch(position, points, watch, faults):
            tracker.report(report)
            show_events(comm, bar, report)
            position = position.after(report, train_s=time.perf_counter() - started)
            if report.end is not None:
                raise report.end
            require_readable(tracker, config.max_unreadable_images)
            if report.asked.save:
                watch.saving(position.step)
                saves.save(position)
                points.saved()
            if report.asked.leave:
                leave(saves, position, run=tracker.folder.name)
        note_profile(comm, tracker, phases)
        faults.at("eval", epoch + 1 - first_epoch)
        test = training.evaluate(position.step, points, watch)
        watch.saving(position.step)
        if test is None:
            saves.save(position)
            leave(saves, position, run=tracker.folder.name)
        best = test.accuracy > (tracker.result["best_accuracy"] or -1.0)
        lr = training.lr((epoch + 1) * training.steps_per_epoch - 1)
        metrics = tracker.epoch_done(
            epoch + 1,
            images=len(training.images.train),
            train_s=position.train_s,
            train={**asdict(position.totals.means()), "lr": lr},
            test=asdict(test),
        )
        show(comm, bar, epoch, config.epochs, metrics)
        if best:
            saves.save_best(position, test.accuracy)
        position = Position(step=position.step, epoch=epoch + 1)
    phases.close()
    show_profile(comm, bar, tracker, note_profile(comm, tracker, phases))
    saves.save(position)
    saves.wait(position.step)


def require_readable(tracker: tracking.Tracker, most: int) -> None:
    """EndOfRun, on all ranks, where more images could not be decoded than may be."""
    count = tracker.result["unreadable_images"]
    if count > most:
        raise EndOfRun(
            f"{count} images could not be decoded, more than --max-unreadable-images {most}: repair the data; each "
            "rank has named its first on standard error",
            status=exits.FAILED,
            reason="too many unreadable images",
        )


def leave(saves: Saves, position: Position, *, run: str) -> NoReturn:
    """Leave with status 0 once the checkpoint is on disk, and with SIGTERM's where it cannot be written."""
    if saves.wait(position.step):
        line = f"saved at step {position.step}; the same command with --run {run} goes on from there"
        raise EndOfRun(line, status=0, reason="preempted")
    raise EndOfRun("asked to leave, and no checkpoint could be written", status=143, reason="terminated")


def note_profile(comm: Comm, tracker: tracking.Tracker, phases: Phases) -> Profile | None:
    """What the clocks of all ranks have measured so far, also for phases.json and the result."""
    profile = over_ranks(comm, phases)
    if profile is not None:
        tracker.result["profile"] = profile.summary()
        tracker.document("phases.json", profile.document())
    return profile


def show_profile(comm: Comm, bar: "tqdm[Any]", tracker: tracking.Tracker, profile: Profile | None) -> None:
    """The verdict in one line, and the picture."""
    if profile is not None and comm.rank == 0:
        tracker.picture("phases", phase_picture.draw(profile), tracker.result["steps"])
        say(comm, bar, profile.verdict.sentence)


def conclude(comm: Comm, tracker: tracking.Tracker, model: nn.Module) -> None:
    """Each rank's last facts, the result, and the last line."""
    tracker.rank_facts(comm.rank, weights_sha256=weights_hash(parameter_hashes(model)))
    tracker.conclude(exits.FINISHED)
    if comm.rank == 0:
        result = tracker.result
        print(
            f"finished: test accuracy {result['eval_accuracy']:.2%} after {result['epochs']} epochs on {comm.size} "
            f"rank{'s' if comm.size > 1 else ''}, {result['wall_time_s']:.0f} s, "
            f"{result['train_images_per_s']:.0f} images/s; {tracker.folder}",
            flush=True,
        )


if __name__ == "__main__":
    exits.run(main)
