"""Train an EfficientNet with Horovod.

    python -m hvdtrain.effnet --data digits --model efficientnet_tiny        one process, no MPI needed
    horovodrun -np 8 python -m hvdtrain.effnet                               one host, CIFAR-10
    mpirun -np 8 python -m hvdtrain.effnet                                   the same by mpirun
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.effnet         two hosts, the best GPUs of each

The result lies in runs/effnet/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

from dataclasses import asdict

from hvdtrain.safety import exits
from hvdtrain.settings.join import join_ranks
from hvdtrain.vision.config import EffnetConfig, parse, scaled

# Before the imports that follow, which take seconds: who has given a wrong word need not wait for them.
joined = exits.attempt(lambda: join_ranks(parse, scaled())) if __name__ == "__main__" else None

import torch
from torch import nn

from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.save_points import AgreedSavePoints, SavePoints
from hvdtrain.checkpoint.saves import Saves, resume, saves_of
from hvdtrain.core.feed import Feed
from hvdtrain.core.loop import Limits, end_epoch, follow, measures_of, state_of, train_epoch
from hvdtrain.core.order import BatchSizes
from hvdtrain.core.reports import Reports, host_gauges
from hvdtrain.core.step import TrainingStep
from hvdtrain.elastic.progress import Progress
from hvdtrain.profiling.phases import OFF, Phases
from hvdtrain.program.assembly import (
    compression,
    cut_anew,
    cuts_on_all,
    gradient_bytes,
    open_folder,
    own_device,
    part_of_run,
    recovery_of_run,
    require_batches,
    require_compressible,
    step_clock,
    step_of_run,
)
from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.replicas import whole_hash
from hvdtrain.recipe import batch_norm
from hvdtrain.recipe.schedule import LearningRate, learning_rate
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.options import sent_at_once_mb
from hvdtrain.stages.blocks import Blocks
from hvdtrain.stages.part import Part
from hvdtrain.tracking.run import Run, opened
from hvdtrain.vision import data, models
from hvdtrain.vision.images import Images
from hvdtrain.vision.task import ImageTask, image_task, memory_format


def main() -> None:
    """One rank, from its command line to its result."""
    comm, config = joined or join_ranks(parse, scaled())
    device = own_device(comm, config.precision)
    images = data.load_on_all(comm, config)
    sizes = agreed(comm, lambda: cut(comm, config, images))
    model = models.build_on_all(
        comm,
        config.model,
        classes=images.classes,
        seed=config.seed,
        pretrained=config.pretrained,
        stem_stride=config.stem_stride,
        dropout=config.dropout,
        stochastic_depth=config.stochastic_depth,
    )
    parameters = sum(one.numel() for one in model.parameters())
    blocks = models.blocks(model)
    cuts = cuts_on_all(comm, config, blocks)
    require_compressible(comm, config, model)
    folder = open_folder(comm, config, sizes, samples=len(images.train), unit=ImageTask.unit)
    with opened(
        comm, folder.path, hang_timeout_s=config.hang_timeout_s, timeline=config.timeline, elastic=config.elastic
    ) as run:
        readers = data.readers(comm, config)
        phases = step_clock(config, folder.path, comm, device, watchdog=run.watch, readers=readers)
        task = image_task(config, images, device)
        lr = learning_rate(config, samples=len(images.train), steps_per_epoch=sizes.steps_per_epoch)
        example = torch.rand(max(2, sizes.micro_batch), 3, images.height, images.height)
        example = example.contiguous(memory_format=memory_format(config))
        part = part_of_run(
            comm, config, model, blocks, [example], device=device, cuts=cuts, folder=folder, phases=phases
        )
        step = step_for(
            comm, config, model, task, device, lr=lr.peak, sizes=sizes, phases=phases, part=part, blocks=blocks
        )
        feed = Feed(images.train, task, comm, sizes, seed=config.seed, device=device, phases=phases)
        reports = Reports(comm, host_gauges(comm, device), task, every_steps=config.report_every_steps, device=device)
        limits = Limits(
            max_skipped_steps=config.max_skipped_steps,
            check_replicas_every=config.check_replicas_every,
            most={"unreadable_images": config.max_unreadable_images},
        )
        torch.manual_seed((config.seed << 16) + comm.rank)  # dropout differs between ranks
        parts = state_of(step, limits, reports, seed=config.seed)
        found = folder.resume_from
        position = Position() if found is None else feed.placed(resume(parts, found))
        how = compression(config, device)
        derived = {**asdict(sizes), "steps": lr.total_steps, "peak_lr": lr.peak, "compression": how}
        derived |= {"train_samples": len(images.train), "test_samples": len(images.test), "classes": images.classes}
        derived |= {"parameters": parameters, "fusion_threshold_mb": sent_at_once_mb(config)}
        derived |= {"gradient_bytes": gradient_bytes(model, how)} if comm.replica.size == 1 else {}
        derived |= {"stages_at": parts.stages_at} if part is not None else {}
        run.begin(
            asdict(config),
            derived,
            device=device,
            columns=config.COLUMNS,
            measures=measures_of(task),
            memory=None if found is None else found.about["tracker"],
        )
        if found is not None:
            run.console.say(f"resumed from {found.folder}, epoch {position.epoch + 1}", *folder.changes)
        if part is not None:
            run.console.say(part.sentence())
        saves = saves_of(run, folder, parts, keep=config.keep, elastic=config.elastic)
        progress = Progress(position)
        recovery = recovery_of_run(comm, config, step, parts, progress, saves=saves, run=run)
        points = AgreedSavePoints(
            comm,
            run.leave,
            every_s=config.checkpoint_every_s,
            every_steps=config.checkpoint_every_steps,
            newcomers=recovery.newcomers,
        )
        while not run.concluded:
            try:
                recovery.settle(reports.meet_anew)
                train(
                    config,
                    step,
                    feed,
                    images,
                    progress,
                    lr=lr,
                    limits=limits,
                    reports=reports,
                    saves=saves,
                    points=points,
                    run=run,
                )
                run.conclude(f"test {task.in_words(run.tracker.last_test)}", weights_sha256=whole_hash(comm, model))
            except recovery.changes as change:
                position = recovery.go_on(change)
                sizes = cut_anew(config, sizes, step, feed)
                lr = learning_rate(config, samples=len(images.train), steps_per_epoch=sizes.steps_per_epoch)
                points.go_on()
                saves.go_on(global_batch=sizes.global_batch)
                progress.go_on(feed.placed(position))


def cut(comm: Comm, config: EffnetConfig, images: Images) -> BatchSizes:
    """How the ranks cut an epoch; BadInput where they cannot."""
    sizes = require_batches(
        config, train=len(images.train), test=len(images.test), ranks=comm.data.size, unit=ImageTask.unit
    )
    if config.sync_bn and sizes.micro_batch < 2:
        raise BadInput("--sync-bn with a batch of 1 per rank leaves nothing to normalise: use at least 2")
    return sizes


def step_for(
    comm: Comm,
    config: EffnetConfig,
    model: nn.Module,
    task: ImageTask,
    device: torch.device,
    *,
    lr: float,
    sizes: BatchSizes,
    phases: Phases = OFF,
    part: Part | None = None,
    blocks: Blocks | None = None,
) -> TrainingStep:
    """The model on the device, equal on all ranks, with its optimizer and what a step needs besides."""
    model.to(device)
    comm.data.broadcast_(model)
    model.to(memory_format=memory_format(config))  # type: ignore[call-overload]
    if config.sync_bn:
        batch_norm.convert(model, comm.data)
    return step_of_run(comm, config, model, task, device, lr=lr, sizes=sizes, phases=phases, part=part, blocks=blocks)


def train(
    config: EffnetConfig,
    step: TrainingStep,
    feed: Feed,
    images: Images,
    progress: Progress,
    *,
    lr: LearningRate,
    limits: Limits,
    reports: Reports,
    saves: Saves,
    points: SavePoints,
    run: Run,
) -> None:
    """From where the run stands to its end, with a checkpoint there; EndOfRun where all ranks leave before."""
    position = progress.position
    first_epoch = position.epoch
    for epoch in range(first_epoch, config.epochs):
        coming = train_epoch(
            step,
            feed,
            position,
            lr=lr,
            limits=limits,
            reports=reports,
            save_points=points,
            watchdog=run.watch,
            faults=run.faults,
            progress=progress,
            console=run.console,
        )
        position = follow(coming, position, limits=limits, saves=saves, save_points=points, run=run, progress=progress)
        run.profile(step.phases)
        run.faults.at("eval", epoch + 1 - first_epoch)
        position = end_epoch(
            step,
            images.test,
            position,
            epochs=config.epochs,
            lr=lr,
            sizes=feed.sizes,
            saves=saves,
            save_points=points,
            run=run,
        )
        progress.go_on(position)
    step.phases.close()
    saves.save(position)
    saves.wait(position.step)
    run.profile(step.phases, last=True)  # after what may be done again, where a rank is lost in it


if __name__ == "__main__":
    exits.run(main)
