"""Before the first step: device, batches and folder, agreed on by all ranks, and what makes the step."""

import os
from dataclasses import asdict
from pathlib import Path

import torch
from torch import nn
from torch.amp.grad_scaler import GradScaler

from hvdtrain.checkpoint import changes
from hvdtrain.checkpoint.run_folder import RunFolder, open_on_all
from hvdtrain.checkpoint.saves import Saves
from hvdtrain.checkpoint.state import State
from hvdtrain.core.feed import Feed
from hvdtrain.core.order import BatchSizes, batch_sizes
from hvdtrain.core.step import TrainingStep, precision_context
from hvdtrain.core.task import Task
from hvdtrain.elastic import recovery
from hvdtrain.elastic.comm import ElasticComm
from hvdtrain.elastic.newcomers import invited
from hvdtrain.elastic.progress import Progress
from hvdtrain.elastic.recovery import Recovery, Survivors
from hvdtrain.profiling.passes import clock, least_steps
from hvdtrain.profiling.phases import OFF, WARMUP_STEPS, Phases
from hvdtrain.profiling.trace import BEFORE_STEPS, NvtxRanges, TorchTrace, nsight_looks, unmeasured_steps
from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.buckets import BucketSync
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.device import choose_device, require_own_device
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.recipe import optim
from hvdtrain.recipe.average import averages_of_run, horizon_steps
from hvdtrain.safety.exits import BadInput
from hvdtrain.safety.watchdog import Watchdog
from hvdtrain.settings.options import RunConfig, power_rank, rounds, sent_at_once_mb
from hvdtrain.stages.blocks import Blocks, Inputs
from hvdtrain.stages.comm import OPTIONS, PartsComm
from hvdtrain.stages.part import Part, measured_on_all, part_on_all, require_stages
from hvdtrain.stages.point_to_point import join_replica
from hvdtrain.sync.comm import HostsComm
from hvdtrain.sync.power_sgd import PowerSGD, largest_rank, sent_elements
from hvdtrain.sync.rounds import EVERY_STEP, LocalRounds
from hvdtrain.sync.two_level import TwoLevelSync
from hvdtrain.tracking.run import Run


def own_device(comm: Comm, precision: str) -> torch.device:
    """This rank's device, which is no other rank's; BadInput where it lacks the precision."""
    device = agreed(comm, lambda: usable_device(comm, precision))
    require_own_device(comm, device)
    return device


def usable_device(comm: Comm, precision: str) -> torch.device:
    """This rank's device; BadInput where it lacks the precision."""
    device = choose_device(comm)
    if precision == "fp16" and device.type == "cpu":
        raise BadInput("--precision fp16 needs a GPU: use bf16 or fp32 on CPUs")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(f"--precision bf16: {torch.cuda.get_device_name(device)} has no bf16, use fp16 or fp32")
    return device


def require_batches(
    config: RunConfig, *, train: int, test: int, ranks: int, unit: str, max_steps: int | None = None
) -> BatchSizes:
    """How the ranks cut an epoch of `train` samples; BadInput where they cannot, or where there are none to test.

    Or where the run, which ends after `max_steps` if not by its epochs, is too short for what is to be measured.
    """
    sizes = batch_sizes(config, samples=train, ranks=ranks)
    share, micro_batch = train // ranks, sizes.micro_batch
    if share < 1 or test < 1:
        raise BadInput(
            f"--data {config.data} has {train} training and {test} test {unit} for {ranks} ranks: give more {unit} or "
            "start fewer ranks"
        )
    if micro_batch * config.accumulate_steps > share:
        given = f"--batch-size-per-rank {micro_batch}"
        given += f" x --accumulate-steps {config.accumulate_steps}" if config.accumulate_steps > 1 else ""
        if config.global_batch_size is not None:
            given = f"{micro_batch * config.accumulate_steps} of --global-batch-size {config.global_batch_size}"
        raise BadInput(
            f"{given} is more than a rank's share of {share} {unit} ({train} over {ranks} ranks): lower it, or start "
            "fewer ranks"
        )
    every = rounds(config)
    if every is not None and every.steps > sizes.steps_per_epoch:
        raise BadInput(
            f"--sync-every {config.sync_every}: an epoch has {sizes.steps_per_epoch} steps, and rounds end with it: "
            "give no more"
        )
    steps, more = config.epochs * sizes.steps_per_epoch, "give more --epochs"
    if max_steps is not None:
        steps, more = max_steps, "give more --max-steps"
    if config.torch_profile is not None and config.torch_profile + BEFORE_STEPS > steps:
        raise BadInput(
            f"--torch-profile {config.torch_profile} after {BEFORE_STEPS} steps of warm-up is more than the run's "
            f"{steps} steps: lower it, or {more}"
        )
    if config.profile == "exact" and steps < (least := least_steps(_unmeasured_steps(config))):
        raise BadInput(
            f"--profile exact needs {least} steps to measure them in two ways, the run has {steps}: {more} "
            "or leave out =exact"
        )
    return sizes


def open_folder(
    comm: Comm, config: RunConfig, sizes: BatchSizes, *, samples: int, unit: str, content: str | None = None
) -> RunFolder:
    """The run folder, which must be new or of a training on as many samples with settings that fit.

    `content` is the SHA-256 of the data, where it is known: then they must be the same.
    """
    os.umask(0o077)  # what a run leaves is for its owner alone
    invitation = invited(os.environ)
    about = changes.about(
        asdict(config), np=comm.size, global_batch=sizes.global_batch, samples=samples, unit=unit, content=content
    )
    if invitation is not None:
        return RunFolder(path=Path(invitation.run), opened=None, shared=True, resume_from=None, about=about, changes=[])
    return open_on_all(
        comm,
        config.runs_dir / config.experiment,
        config.run,
        overwrite=config.overwrite,
        resume=config.resume == "auto",
        about=about,
        shaping=config.SHAPING,
        aside=config.ASIDE,
    )


def step_clock(
    config: RunConfig, folder: Path, comm: Comm, device: torch.device, *, watchdog: Watchdog, readers: int
) -> Phases:
    """What measures the phases of this rank's steps, and shows them in traces, if anything does.

    `readers` are the processes that read ahead for it.
    """

    def meet() -> None:
        comm.allgather(None)
        if watchdog.step is not None:
            watchdog.working(watchdog.step)  # each phase has the limit anew: who is late is named, and not who waits

    phases = clock(config.profile, device, meet, unmeasured_steps=_unmeasured_steps(config), readers=readers)
    if device.type == "cuda" and (phases is not OFF or nsight_looks()):
        phases = NvtxRanges(phases)
    if config.torch_profile is None:
        return phases
    trace = folder / "profile" / f"rank-{comm.rank}.pt.trace.json.gz"
    return TorchTrace(phases, trace, steps=config.torch_profile, device=device)


def _unmeasured_steps(config: RunConfig) -> int:
    return WARMUP_STEPS if config.torch_profile is None else unmeasured_steps(config.torch_profile)


def compression(config: RunConfig, device: torch.device) -> str:
    """How gradients travel."""
    return config.compression or ("fp16" if device.type == "cuda" and config.sync != "two-level" else "none")


def require_compressible(comm: Comm, config: RunConfig, model: nn.Module) -> None:
    """Raise BadInput where --compression would make no gradient of the model smaller."""
    rank = power_rank(config.compression)

    def look() -> None:
        if rank is not None and rank > (most := largest_rank(model)):
            remedy = f"give at most {most}" if most else "leave it out"
            raise BadInput(f"--compression powersgd:{rank} makes no gradient of this model half as large: {remedy}")

    agreed(comm, look)


def gradient_bytes(model: nn.Module, how: str) -> int:
    """Of the gradients that a rank sums at each step, as they travel: `how` is the compression."""
    bytes_each = 2 if how == "fp16" else 4
    return bytes_each * sent_elements(model, power_rank(how))


def cuts_on_all(comm: Comm, config: RunConfig, blocks: Blocks) -> tuple[int, ...] | None:
    """Where --stages-at cuts these blocks, if it is given; BadInput where they cannot be cut so."""
    if config.stages == 1:
        return None
    return agreed(comm, lambda: require_stages(blocks, config.stages, config.stages_at))


def join_replica_on_all(comm: Comm, device: torch.device, folder: RunFolder) -> None:
    """Let torch.distributed's world be this rank's replica; BadInput where one of the first does not see the folder."""

    def look() -> None:
        if comm.data.rank == 0 and not folder.shared:
            option = f"{OPTIONS[comm.part]} {comm.replica.size}"
            raise BadInput(f"{option}: put --runs-dir where all ranks of a replica see it")

    agreed(comm, look)
    assert isinstance(comm, PartsComm)
    join_replica(comm.replica, device)


def part_of_run(
    comm: Comm,
    config: RunConfig,
    model: nn.Module,
    blocks: Blocks,
    example: Inputs,
    *,
    device: torch.device,
    cuts: tuple[int, ...] | None,
    folder: RunFolder,
    phases: Phases,
) -> Part | None:
    """This rank's stage, cut as in the checkpoint if `cuts` are not given; the model keeps only that.

    `example` are the inputs of one micro-batch. BadInput where a stage of the first replica does not see the run
    folder.
    """
    if config.stages == 1:
        return None
    from hvdtrain.stages.pipeline import Pipeline  # a second of imports

    recorded = () if folder.resume_from is None else tuple(folder.resume_from.about.get("stages_at", ()))
    if cuts is None and len(recorded) == config.stages - 1:
        cuts = recorded
    join_replica_on_all(comm, device, folder)
    context = precision_context(device, config.precision)
    passages = measured_on_all(comm, model, blocks, example, device=device, context=context)
    pipeline = Pipeline(comm.replica.rank, config.stages, device, order=config.pipeline_schedule, phases=phases)
    return part_on_all(comm, model, blocks, passages, cuts=cuts, pipeline=pipeline, recompute=config.recompute)


def cut_anew(config: RunConfig, sizes: BatchSizes, step: TrainingStep, feed: Feed) -> BatchSizes:
    """Cut what is left of the run over the ranks that are left, where others have cut it into `sizes`.

    The global batch stays where the settings name it: then each takes more micro-batches. Else the batch per rank does.
    """
    if config.global_batch_size is None:
        sizes = batch_sizes(config, samples=len(feed.split), ranks=step.comm.data.size)
    feed.cut(sizes)
    if step.average is not None:
        step.average.remember(horizon_steps=horizon_steps(config, sizes.steps_per_epoch))
    return sizes


def recovery_of_run(
    comm: Comm,
    config: RunConfig,
    step: TrainingStep,
    parts: State,
    progress: Progress,
    *,
    saves: Saves,
    run: Run,
) -> Recovery:
    """What brings the ranks that are left to where `progress` stands, when others are lost."""
    if not isinstance(comm, ElasticComm) or not isinstance(step.sync, BucketSync):
        return recovery.OFF
    step.undoable = True
    return Survivors(
        comm,
        parts,
        step.sync,
        progress,
        undo=step.undo,
        saves=saves,
        run=run,
        grow=config.grow,
        min_np=config.min_np,
        hang_timeout_s=config.hang_timeout_s,
    )


def step_of_run(
    comm: Comm,
    config: RunConfig,
    model: nn.Module,
    task: Task,
    device: torch.device,
    *,
    lr: float,
    sizes: BatchSizes,
    phases: Phases = OFF,
    part: Part | None = None,
    blocks: Blocks | None = None,
) -> TrainingStep:
    """What a step of this run needs besides its model, which is on the device and equal on all ranks."""
    groups = optim.parameter_groups(model, config.weight_decay, decay_all=config.decay_all)
    average = averages_of_run(model, config, steps_per_epoch=sizes.steps_per_epoch)
    if config.compile:
        model.compile()
        if average is not None:
            average.module.compile()  # it is evaluated, and no copy of a model is compiled with it
    optimizer = optim.BUILD[config.optimizer](groups, lr)
    scaler = GradScaler(device.type, enabled=config.precision == "fp16")
    sync: GradientSync
    if (rank := power_rank(config.compression)) is not None and comm.size > 1:
        sync = PowerSGD(model, rank=rank, ranks=comm.size, begin_sum=comm.begin_sum)
    else:
        sync = comm.data.gradient_sync(
            model,
            compression=compression(config, device),
            loss_is_scaled=config.precision == "fp16",
            reducer=config.reducer,
            groups=config.fusion_groups,
            bucket_mb=sent_at_once_mb(config),
        )
    every, apart = rounds(config), EVERY_STEP
    if every is not None and isinstance(comm, HostsComm) and isinstance(sync, TwoLevelSync):
        apart = LocalRounds(comm, sync, every=every, optimizer=optimizer, average=average, scaler=scaler)
    return TrainingStep(
        model=model,
        task=task,
        optimizer=optimizer,
        comm=comm,
        sync=sync,
        rounds=apart,
        scaler=scaler,
        average=average,
        precision=config.precision,
        clip_value=config.clip_value,
        clip_norm=config.clip_norm,
        find_nan=config.find_nan,
        phases=phases,
        part=part,
        recomputed=blocks if config.recompute else None,
    )
