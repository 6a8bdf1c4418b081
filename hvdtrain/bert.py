"""Train a BERT with Horovod.

    python -m hvdtrain.bert                                                  one process: diagnoses to their chapters
    horovodrun -np 2 python -m hvdtrain.bert --task mlm                      two ranks: masked words of the same texts
    mpirun -np 8 python -m hvdtrain.bert --recipe finetune --pretrained bert-base-uncased --data glue --data-dir SST-2
    hvdlaunch run -np 16 -H one:8,two:8 -- python -m hvdtrain.bert --recipe pretrain --data-dir texts --max-steps 7038

The result lies in runs/bert/<run>/result.json; `tensorboard --logdir runs` shows the curves.
"""

from dataclasses import asdict, replace
from typing import cast

from hvdtrain.safety import exits
from hvdtrain.settings.join import join_ranks
from hvdtrain.text.config import BertConfig, of_steps, parse, tiny

# Before the imports that follow, which take seconds: who has given a wrong word need not wait for them.
joined = exits.attempt(lambda: join_ranks(parse, tiny())) if __name__ == "__main__" else None

import torch
from torch import Tensor

from hvdtrain.checkpoint.position import Position
from hvdtrain.checkpoint.run_folder import has_checkpoints
from hvdtrain.checkpoint.save_points import AgreedSavePoints, SavePoints
from hvdtrain.checkpoint.saves import Saves, resume, saves_of
from hvdtrain.core.feed import Feed
from hvdtrain.core.loop import Limits, end_epoch, follow, measures_of, state_of, train_epoch
from hvdtrain.core.order import BatchSizes, batch_sizes
from hvdtrain.core.reports import Reports, host_gauges
from hvdtrain.core.step import TrainingStep
from hvdtrain.elastic.progress import Progress
from hvdtrain.program.assembly import (
    compression,
    cut_anew,
    cuts_on_all,
    gradient_bytes,
    join_replica_on_all,
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
from hvdtrain.ranks.comm import Comm, stream
from hvdtrain.ranks.replicas import whole_hash
from hvdtrain.recipe.schedule import LearningRate, learning_rate
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.options import sent_at_once_mb
from hvdtrain.stages.whole import whole_on_0
from hvdtrain.text import data
from hvdtrain.text import model as models
from hvdtrain.text.export import export_on_all, require_free
from hvdtrain.text.model import Bert, BertForClassification, BertForMaskedLM, freeze_embeddings, sizes_of
from hvdtrain.text.pretrained import Pretrained, pretrained_on_all
from hvdtrain.text.task import Labels, text_task
from hvdtrain.text.tokens import Texts
from hvdtrain.text.weights import build_on_all
from hvdtrain.tracking.run import Run, opened


def main() -> None:
    """One rank, from its command line to its result."""
    comm, config = joined or join_ranks(parse, tiny())
    device = own_device(comm, config.precision)
    pretrained = None if config.pretrained is None else pretrained_on_all(comm, config.pretrained)
    if pretrained is not None:
        config = replace(config, model=pretrained.source)
    agreed(comm, lambda: check_room(comm, config, pretrained))
    texts = data.load_on_all(comm, config, pretrained)
    config, sizes = agreed(comm, lambda: cut(comm, config, texts))
    model = build_on_all(
        comm,
        lambda: build(config, texts, pretrained),
        seed=config.seed,
        pretrained=pretrained,
        labels=texts.labels,
    )
    parameters = sum(one.numel() for one in model.parameters())
    if config.freeze_embeddings:
        freeze_embeddings(model)
    blocks = models.blocks(model)
    cuts = cuts_on_all(comm, config, blocks)
    require_compressible(comm, config, model)
    folder = open_folder(comm, config, sizes, samples=len(texts.train), unit=Labels.unit, content=texts.sha256)
    with opened(
        comm, folder.path, hang_timeout_s=config.hang_timeout_s, timeline=config.timeline, elastic=config.elastic
    ) as run:
        phases = step_clock(config, folder.path, comm, device, watchdog=run.watch, readers=0)
        task = text_task(config, texts)
        lr = learning_rate(
            config, samples=len(texts.train), steps_per_epoch=sizes.steps_per_epoch, max_steps=config.max_steps
        )
        part = part_of_run(
            comm, config, model, blocks, example(texts, sizes), device=device, cuts=cuts, folder=folder, phases=phases
        )
        if config.tensor > 1:
            join_replica_on_all(comm, device, folder)
            models.slice_layers(model, comm.replica.rank, config.tensor)
        model.to(device)
        comm.data.broadcast_(model)
        step = step_of_run(
            comm, config, model, task, device, lr=lr.peak, sizes=sizes, phases=phases, part=part, blocks=blocks
        )
        feed = Feed(texts.train, task, comm, sizes, seed=config.seed, device=device, phases=phases)
        reports = Reports(comm, host_gauges(comm, device), task, every_steps=config.report_every_steps, device=device)
        limits = Limits(max_skipped_steps=config.max_skipped_steps, check_replicas_every=config.check_replicas_every)
        torch.manual_seed((config.seed << 16) + stream(comm))  # dropout differs between ranks
        parts = state_of(step, limits, reports, seed=config.seed)
        found = folder.resume_from
        position = Position() if found is None else feed.placed(resume(parts, found))
        about: dict[str, float] = {"vocabulary": len(texts.vocabulary.tokens), "classes": len(texts.labels)}
        about |= {"cut_texts": texts.cut, "unknown_tokens": texts.unknown}
        how = compression(config, device)
        derived = {**asdict(sizes), "steps": lr.total_steps, "peak_lr": lr.peak, "compression": how, **about}
        derived |= {"train_samples": len(texts.train), "test_samples": len(texts.test), "parameters": parameters}
        derived |= {"fusion_threshold_mb": sent_at_once_mb(config)}
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
        if texts.cut:
            run.console.say(f"{texts.cut} texts are cut off after --max-tokens {config.max_tokens}")
        if texts.unknown >= 1e-4:
            run.console.say(f"{texts.unknown:.2%} of the tokens are [UNK]: the vocabulary has no pieces for them")
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
                    texts,
                    progress,
                    lr=lr,
                    limits=limits,
                    reports=reports,
                    saves=saves,
                    points=points,
                    run=run,
                )
                if config.export is not None:
                    export_on_all(comm, config.export, whole(comm, config, step, texts, pretrained), texts)
                run.conclude(f"test {task.in_words(run.tracker.last_test)}", weights_sha256=whole_hash(comm, model))
            except recovery.changes as change:
                position = recovery.go_on(change)
                sizes = cut_anew(config, sizes, step, feed)
                lr = learning_rate(
                    config,
                    samples=len(texts.train),
                    steps_per_epoch=sizes.steps_per_epoch,
                    max_steps=config.max_steps,
                    before=lr,
                )
                points.go_on()
                saves.go_on(global_batch=sizes.global_batch)
                progress.go_on(feed.placed(position))


def check_room(comm: Comm, config: BertConfig, pretrained: Pretrained | None) -> None:
    """Raise BadInput where the model has too few positions or cannot be sliced so, or the export has no place."""
    sizes = sizes_of(config.model, vocabulary=config.vocab_size) if pretrained is None else pretrained.sizes
    if pretrained is not None:
        pretrained.require_room(config.max_tokens)
    elif config.max_tokens > sizes.positions:
        raise BadInput(
            f"--max-tokens {config.max_tokens}: {config.model} has {sizes.positions} positions; give no more"
        )
    models.require_slices(sizes, config.tensor)
    if config.export is not None and comm.rank == 0:
        own = has_checkpoints(config.runs_dir / config.experiment, config.run)  # what stands there then
        require_free(config.export, runs=config.runs_dir, replace=config.overwrite or own)


def cut(comm: Comm, config: BertConfig, texts: Texts) -> tuple[BertConfig, BatchSizes]:
    """The settings, with the epochs that --max-steps are, and how the ranks cut one; BadInput where they cannot."""
    train, test, ranks = len(texts.train), len(texts.test), comm.data.size
    config = of_steps(config, steps_per_epoch=batch_sizes(config, samples=train, ranks=ranks).steps_per_epoch)
    return config, require_batches(
        config, train=train, test=test, ranks=ranks, unit=Labels.unit, max_steps=config.max_steps
    )


def build(config: BertConfig, texts: Texts, pretrained: Pretrained | None) -> Bert:
    """The model of the settings, or in the sizes of the pretrained one, with a head for the task."""
    words = len(texts.vocabulary.tokens)
    sizes = sizes_of(config.model, vocabulary=words) if pretrained is None else pretrained.sizes
    if config.dropout is not None:
        sizes = replace(sizes, dropout=config.dropout)
    return BertForMaskedLM(sizes) if config.task == "mlm" else BertForClassification(sizes, len(texts.labels))


def example(texts: Texts, sizes: BatchSizes) -> list[Tensor]:
    """The inputs of a micro-batch of mean length."""
    length = max(2, round(texts.train.lengths.double().mean().item()))
    tokens = torch.zeros(sizes.micro_batch, length, dtype=torch.long)
    places = torch.arange(0, tokens.numel(), 7)  # one in seven is masked
    return [tokens, tokens, torch.ones_like(tokens, dtype=torch.bool), places]


def whole(comm: Comm, config: BertConfig, step: TrainingStep, texts: Texts, pretrained: Pretrained | None) -> Bert:
    """What was evaluated, on rank 0 of all parts of a replica."""
    if comm.part == "all":
        return cast("Bert", step.evaluated)
    weights = whole_on_0(comm, step.evaluated)
    model = build(config, texts, pretrained)
    if comm.rank == 0:
        model.load_state_dict(weights)
    return model


def train(
    config: BertConfig,
    step: TrainingStep,
    feed: Feed,
    texts: Texts,
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
    first_epoch, epochs = position.epoch, config.epochs
    if config.max_steps is not None:  # others than at first, where ranks were lost
        epochs = run.tracker.result["epochs"] = feed.epochs(position, config.max_steps)
    for epoch in range(first_epoch, epochs):
        coming = train_epoch(
            step,
            feed,
            position,
            lr=lr,
            limits=limits,
            reports=reports,
            max_steps=config.max_steps,
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
            texts.test,
            position,
            epochs=epochs,
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
