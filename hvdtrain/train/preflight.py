"""Before the first step: settings, device, data, model and run folder, agreed on by all ranks."""

import math
import os
import sys
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path

import torch
from torchvision.models import EfficientNet

from hvdtrain.checkpoint import changes as differences
from hvdtrain.checkpoint import files as checkpoint
from hvdtrain.checkpoint import folder
from hvdtrain.checkpoint.folder import Opened
from hvdtrain.ranks.comm import Comm, agreed, choose_device, connect, cores_together, require_equal
from hvdtrain.record import tracker as tracking
from hvdtrain.safety import exits
from hvdtrain.safety.exits import BadInput
from hvdtrain.timing.trace import BEFORE_STEPS
from hvdtrain.vision import images as data
from hvdtrain.vision import models
from hvdtrain.vision.config import EffnetConfig, parse, scaled


def join_ranks() -> tuple[Comm, EffnetConfig]:
    """Settings that all ranks have read alike, and the ranks."""
    try:
        config, bad = parse(sys.argv[1:]), None
    except BadInput as error:
        config, bad = scaled(), error  # the ranks still have to meet, to agree that they leave
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # as torch.use_deterministic_algorithms asks for
        torch.use_deterministic_algorithms(True)
    comm = connect(
        fusion_threshold_mb=0.0 if config.deterministic else config.fusion_threshold_mb,
        cycle_time_ms=config.cycle_time_ms,
        timeline=config.timeline,
    )

    def usable() -> None:
        if bad is not None:
            raise bad

    agreed(comm, usable)
    settings = {f"--{name.replace('_', '-')}": str(value) for name, value in asdict(config).items()}
    versions = {f"the version of {name}": value for name, value in tracking.versions().items()}
    require_equal(comm, {**settings, **versions, "the code of hvdtrain (its SHA-256)": tracking.code_hash()})
    return comm, config


def usable_device(comm: Comm, precision: str) -> torch.device:
    """This rank's device; BadInput where it lacks the precision."""
    device = choose_device(comm)
    if precision == "fp16" and device.type == "cpu":
        raise BadInput("--precision fp16 needs a GPU: use bf16 or fp32 on CPUs")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(f"--precision bf16: {torch.cuda.get_device_name(device)} has no bf16, use fp16 or fp32")
    return device


def load_images(comm: Comm, config: EffnetConfig) -> data.Images:
    """The data set, downloaded by one rank of each host while the others wait."""
    agreed(comm, lambda: data.fetch(config.data, config.data_dir) if comm.local_rank == 0 else None)

    def load() -> data.Images:
        images = data.load(
            config.data,
            config.data_dir,
            height=models.image_size(config.model),
            rank=comm.rank,
            size=comm.size,
            workers=max(1, cores_together(comm.local_size) // comm.local_size),
        )
        share = len(images.train) // comm.size
        micro_batch = images_at_a_time(config, comm.size)
        if share < 1 or len(images.test) < 1:
            raise BadInput(
                f"--data {config.data} has {len(images.train)} training and {len(images.test)} test images for "
                f"{comm.size} ranks: give more images or start fewer ranks"
            )
        if micro_batch * config.accumulate_steps > share:
            given = f"--batch-size-per-rank {micro_batch}"
            given += f" x --accumulate-steps {config.accumulate_steps}" if config.accumulate_steps > 1 else ""
            if config.global_batch_size is not None:
                given = f"{micro_batch * config.accumulate_steps} of --global-batch-size {config.global_batch_size}"
            raise BadInput(
                f"{given} is more than a rank's share of {share} images "
                f"({len(images.train)} over {comm.size} ranks): lower it, or start fewer ranks"
            )
        steps = config.epochs * math.ceil(len(images.train) / (micro_batch * config.accumulate_steps * comm.size))
        if config.torch_profile is not None and config.torch_profile + BEFORE_STEPS > steps:
            raise BadInput(
                f"--torch-profile {config.torch_profile} after {BEFORE_STEPS} steps of warm-up is more than the run's "
                f"{steps} steps: lower it, or give more --epochs"
            )
        return images

    images = agreed(comm, load)
    require_equal(comm, {"the number of training images": len(images.train)})
    return images


def images_at_a_time(config: EffnetConfig, ranks: int) -> int:
    """The images that a rank takes through the model at a time; BadInput where the ranks do not divide the batch."""
    if config.global_batch_size is None:
        each = config.batch_size_per_rank
    else:
        each, rest = divmod(config.global_batch_size, ranks * config.accumulate_steps)
        if rest or not each:
            parts = ranks * config.accumulate_steps
            near = max(1, round(config.global_batch_size / parts)) * parts
            raise BadInput(
                f"--global-batch-size {config.global_batch_size} cannot be divided by {ranks} ranks x "
                f"--accumulate-steps {config.accumulate_steps}: {near} can"
            )
    if config.sync_bn and each < 2:
        raise BadInput("--sync-bn with a batch of 1 per rank leaves nothing to normalise: use at least 2")
    return each


def build_model(comm: Comm, config: EffnetConfig, classes: int) -> EfficientNet:
    """The model, initialised alike on all ranks, with pretrained weights if asked for."""

    def build() -> EfficientNet:
        torch.manual_seed(config.seed)
        model = models.build(
            config.model,
            classes=classes,
            stem_stride=config.stem_stride,
            dropout=config.dropout,
            stochastic_depth=config.stochastic_depth,
        )
        if config.pretrained is not None:
            models.load_weights(model, models.pretrained_weights(config.model, config.pretrained), config.pretrained)
        return model

    if config.pretrained == "hub":  # one download per host
        agreed(comm, lambda: models.pretrained_weights(config.model, "hub") if comm.local_rank == 0 else None)
    return agreed(comm, build)


@dataclass(frozen=True, kw_only=True)
class RunFolder:
    """The run folder of all ranks."""

    path: Path
    opened: Opened | None  # on rank 0 alone
    resume_from: checkpoint.Found | None  # the same checkpoint on every rank


def make_run_folder(comm: Comm, config: EffnetConfig, *, training_images: int) -> RunFolder:
    """The run folder, for no other run than this one: a new one, or one with a checkpoint to go on from.

    BadInput, with all that is in it kept, where that checkpoint is of another model or of other data.
    """
    os.umask(0o077)  # what a run leaves is for its owner alone
    job = os.environ.get("HVDLAUNCH_JOB") or datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
    name = config.run or comm.gather(job)[0]
    path = config.runs_dir / config.experiment / name
    attempt = int(os.environ.get("HVDLAUNCH_ATTEMPT", "0"))
    settings = differences.as_json(asdict(config))

    def open_it() -> Opened | None:
        if comm.rank != 0:
            return None
        # The attempt before may take a moment to die.
        return folder.open_folder(
            path,
            overwrite=config.overwrite,
            resume=config.resume == "auto" or attempt > 0,  # "never" is not for what this run has saved itself
            patience_s=10.0 if attempt else 0.0,
            accept=lambda found: differences.changed(found.about, settings, training_images=training_images),
        )

    opened = agreed(comm, open_it)
    told = None
    if opened is not None:
        told = [opened.nonce, opened.found and opened.found.folder.name, opened.passed_over]
        exits.report(run_folder=str(path.resolve()))
    nonce, found, passed_over = comm.gather(told)[0]
    if comm.rank == 0:
        for line in passed_over:
            print(f"hvdtrain: passed over {line}", file=sys.stderr, flush=True)

    def look() -> checkpoint.Found | None:
        shared = folder.is_shared(path, nonce)
        if not shared and (found is not None or "HVDLAUNCH_ATTEMPT" in os.environ):
            raise BadInput(
                f"{path} here is not the folder that rank 0 has opened: --restarts and resuming need one that all "
                "hosts share, put --runs-dir there"
            )
        return None if found is None else checkpoint.open_one(path / "checkpoints" / found)

    return RunFolder(path=path, opened=opened, resume_from=agreed(comm, look))
