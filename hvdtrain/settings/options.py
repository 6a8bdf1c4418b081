"""The settings that every script has."""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

from hvdtrain.ranks.comm import BUCKET_MB, ReplicaPart
from hvdtrain.safety.exits import BadInput
from hvdtrain.settings import command_line
from hvdtrain.settings.command_line import AT_LEAST_0, AT_LEAST_1, FOLDER_NAME, POSITIVE, Alone, Missing, requires
from hvdtrain.settings.optimizers import OPTIMIZERS
from hvdtrain.stages.comm import OPTIONS
from hvdtrain.sync.comm import Every


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """How any model is trained, recorded and kept; a script adds its data and its model."""

    # Settings that say what the tensors of a checkpoint mean: with another value it is of no use.
    SHAPING: ClassVar[tuple[str, ...]] = ("data", "model", "optimizer", "decay_all", "seed")
    # By these a person compares runs; TensorBoard shows the ranks and the first four from the beginning.
    COLUMNS: ClassVar[tuple[str, ...]] = (
        "recipe",
        "model",
        "global_batch",
        "peak_lr",
        "optimizer",
        "data",
        "epochs",
        "precision",
        "compression",
    )
    # The fifteen that are used most, first in --help.
    MOST_USED: ClassVar[tuple[str, ...]] = ()
    # What the groups of the others are called, by the first field of each.
    GROUPS: ClassVar[Mapping[str, str]] = {
        "recipe": "batches",
        "stages": "a model over several ranks",
        "optimizer": "optimizer and schedule",
        "precision": "precision and compilation",
        "compression": "gradients between ranks",
        "elastic": "lost ranks and new ones",
        "resume": "checkpoints",
        "max_skipped_steps": "limits and checks",
        "workers": "files that are read",
        "report_every_steps": "reports and profiles",
        "seed": "the run and its folder",
    }
    # Settings that say where a run is kept and what is watched, not what it computes.
    ASIDE: ClassVar[tuple[str, ...]] = (
        "resume",
        "overwrite",
        "runs_dir",
        "experiment",
        "run",
        "data_dir",
        "checkpoint_every_s",
        "checkpoint_every_steps",
        "keep",
        "hang_timeout_s",
        "find_nan",
        "workers",
        "prefetch",
        "report_every_steps",
        "profile",
        "torch_profile",
        "timeline",
        "pipeline_schedule",
        "recompute",
        "elastic",
        "grow",
        "min_np",
    )

    recipe: str = "scaled"
    """Where the other defaults come from."""
    data: str
    data_dir: Path = Path("data")
    model: str
    epochs: Annotated[int, AT_LEAST_1] = 25
    """Times that each sample is visited."""
    batch_size_per_rank: Annotated[int, AT_LEAST_1] = 256
    """Samples that a rank takes through the model at a time."""
    global_batch_size: Annotated[int | None, AT_LEAST_1] = None
    """Samples per optimizer step of all ranks together, in place of batch-size-per-rank."""
    accumulate_steps: Annotated[int, AT_LEAST_1] = 1
    """Batches per optimizer step; global batch = ranks x batch-size-per-rank x accumulate-steps, at most: an epoch is
    cut evenly."""
    stages: Annotated[int, AT_LEAST_1] = 1
    """Cut the model over this many neighbouring ranks; replicas = ranks / stages, and the batches of accumulate-steps
    follow each other through the stages."""
    stages_at: str | None = None
    """The first blocks of the stages but the first, as 4,9; by the blocks' measured times if not given, a resumed run
    where it was cut before."""
    pipeline_schedule: Literal["1f1b", "gpipe"] = "1f1b"
    """1f1b holds as many batches as there are stages, gpipe all of accumulate-steps."""
    recompute: bool = False
    """Keep what blocks hand on, and compute what is inside them again in the backward pass: less memory, about a third
    more time."""
    optimizer: str = "sgd"
    """sgd, rmsprop, adam, adamw, lars or lamb."""
    lr: Annotated[float | None, POSITIVE] = None
    """For a global batch of 256; the optimizer's usual one if not given."""
    scale_lr: bool = True
    """Follow the global batch: linear for sgd, rmsprop and lars, square root for adam, adamw and lamb."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up: to nearly 0 at the last step, or not at all."""
    warmup_epochs: Annotated[float | None, AT_LEAST_0] = 5.0
    """Epochs in which the learning rate rises to its peak; at most half of the run."""
    weight_decay: Annotated[float, AT_LEAST_0] = 5e-4
    """Of the weights, at each step; norms and biases do not decay."""
    decay_all: bool = False
    """Decay norms and biases as well."""
    ema_epochs: Annotated[float, AT_LEAST_0] = 2.0
    """Memory of the moving average of the weights that is evaluated; 0 evaluates the weights themselves."""
    clip_value: Annotated[float | None, POSITIVE] = None
    """Largest absolute value of a gradient element."""
    clip_norm: Annotated[float | None, POSITIVE] = None
    """Largest norm of all gradients together, after clip-value."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the forward and backward pass; the weights stay in fp32. fp16 needs a GPU."""
    tf32: bool = True
    """Multiply in TF32 (a mantissa of 10 bits) where fp32 is computed on a GPU that can."""
    compile: bool = False
    """torch.compile the model."""
    compression: str | None = None
    """How gradients travel: none, fp16, or powersgd:R, as two matrices of R columns each; fp16 on GPUs and none on CPUs
    if not given."""
    sync: Literal["flat", "two-level", "local"] = "flat"
    """flat sums over all ranks at once; two-level inside each host, then over hosts; local inside each host alone, and
    hosts take their mean in rounds."""
    sync_every: str | None = None
    """K or K@E: local's steps in a round, and the epoch after which rounds begin."""
    sync_group_size: Annotated[int | None, AT_LEAST_1] = None
    """Neighbouring ranks in place of those of a host."""
    reducer: Literal["bucket", "horovod"] = "bucket"
    """bucket lets gradients lie in flat buckets and sends each when its last one is there; horovod sends them by
    Horovod's own hooks, as many at once as have come by then."""
    fusion_threshold_mb: Annotated[float | None, AT_LEAST_0] = None
    """MiB of gradients that are sent at once: for horovod at most, 128 if not given; for bucket a bucket's size, 25 if
    not given. 0 sends each gradient alone. If not given, horovodrun's --fusion-threshold-mb is taken."""
    fusion_groups: Annotated[int | None, AT_LEAST_1] = None
    """Of the reducer horovod: send the gradients in this many fixed groups; as they come if not given."""
    cycle_time_ms: Annotated[float | None, POSITIVE] = None
    """Pause between Horovod's rounds; Horovod's own if not given."""
    deterministic: bool = False
    """Weights that are bit-equal whenever the run is repeated or resumed; slower."""
    elastic: bool = False
    """When a rank dies the others go on in place, from the last step; needs Open MPI 5 and mpirun --with-ft ulfm."""
    grow: bool = False
    """With elastic: others start in the place of those that died, and join once they have loaded."""
    min_np: Annotated[int, AT_LEAST_1] = 1
    """With elastic: save and end where fewer ranks are left."""
    resume: Literal["auto", "never"] = "auto"
    """auto goes on from the run's newest valid checkpoint, if it has any; never starts anew."""
    checkpoint_every_s: Annotated[float, AT_LEAST_0] = 300.0
    """Seconds between checkpoints; 0 for none by the clock."""
    checkpoint_every_steps: Annotated[int | None, AT_LEAST_1] = None
    """Steps between checkpoints, besides those by the clock."""
    keep: Annotated[int, AT_LEAST_1] = 2
    """Newest checkpoints to keep; the best weights are kept apart."""
    max_skipped_steps: Annotated[int, AT_LEAST_1] = 20
    """End with status 3 after so many steps in a row whose loss or gradients were not finite."""
    find_nan: bool = False
    """After a skipped step compute the gradients once more, to name the rank whose own were not finite; each step is
    slower, since the host waits for it."""
    check_replicas_every: Annotated[int, AT_LEAST_0] = 0
    """Steps between comparisons of the parameters of all ranks, by a sum of their bits that depends on each element's
    place; 0 for never."""
    hang_timeout_s: Annotated[float | None, AT_LEAST_0] = None
    """A step that takes longer ends the run; 10 times the median step and at least 60 if not given, 0 for never.
    Reading files may take ten times as long, 600 s if not given."""
    workers: Annotated[int | None, AT_LEAST_0] = None
    """Processes per rank that read files; one for each of its cores if not given, 0 lets the rank read by itself. Data
    that fit on the device need none."""
    prefetch: Annotated[int, AT_LEAST_0] = 2
    """Batches of files that each of them reads ahead; 0 lets the rank read each batch when its step begins."""
    report_every_steps: Annotated[int, AT_LEAST_1] = 20
    """Steps between reports to TensorBoard and metrics.jsonl; an epoch's end is always one."""
    profile: Annotated[Literal["off", "on", "exact"], Alone(means="on")] = "off"
    """on (the option alone says it) measures the phases of each step; exact measures each phase alone as well."""
    torch_profile: Annotated[int | None, AT_LEAST_1] = None
    """Steps to trace with torch.profiler into profile/ of the run folder."""
    timeline: bool = False
    """Write Horovod's timeline.json into the run folder; a thread of its own spins meanwhile."""
    seed: Annotated[int, AT_LEAST_0] = 0
    """Of the first weights, of the order of samples and of all else that is random."""
    runs_dir: Path = Path("runs")
    """Where the folders of all experiments are."""
    experiment: Annotated[str, FOLDER_NAME] = "run"
    run: Annotated[str | None, FOLDER_NAME] = None
    """Name of the run; date and time if not given."""
    overwrite: bool = False
    """Replace a finished run of the same name."""

    @property
    def parts(self) -> tuple[ReplicaPart, int]:
        """What each rank of a replica holds, and how many ranks that takes."""
        return ("all", 1) if self.stages == 1 else ("stage", self.stages)


def check(config: RunConfig, given: set[str]) -> None:
    """Raise BadInput for settings that cannot go together; `given` are the fields that the command line names."""
    if {"global_batch_size", "batch_size_per_rank"} <= given:
        raise BadInput(
            f"--global-batch-size {config.global_batch_size} and --batch-size-per-rank {config.batch_size_per_rank} "
            "both set the batch: give one of them"
        )
    if config.optimizer not in OPTIMIZERS:
        raise BadInput(f"--optimizer {config.optimizer!r} is unknown: choose one of {', '.join(OPTIMIZERS)}")
    if config.deterministic and config.fusion_threshold_mb:
        raise BadInput(
            f"--deterministic sums each gradient by itself, --fusion-threshold-mb {config.fusion_threshold_mb} several "
            "at once: leave one of them out"
        )
    if config.recompute and config.compile:
        raise BadInput("--recompute runs the model block by block, --compile all of it: leave one of them out")
    _check_parts(config)
    _check_sync(config)
    _check_compression(config)
    _check_elastic(config)
    if config.seed >= 2**32:
        raise BadInput(f"--seed {config.seed} must be less than 2**32")
    if OPTIMIZERS[config.optimizer].layerwise and config.precision == "fp16":
        raise BadInput(
            f"--optimizer {config.optimizer} divides by gradient norms, which --precision fp16 rounds to 0: "
            "use bf16 or fp32"
        )


Config = TypeVar("Config", bound=RunConfig)


def require_complete(config: Config, also_check: Callable[[Config], None], also_missing: Sequence[str] = ()) -> None:
    """Raise Incomplete for all that settings which go together lack.

    `also_missing` is what a script's own ones lack, and `also_check` refuses what does not go together with those.
    """
    missing: Missing = {line: {} for line in also_missing} | _missing_for_stages(config) | _missing_for_sync(config)
    if config.reducer == "bucket" and config.fusion_groups is not None:
        missing[requires(f"--fusion-groups {config.fusion_groups}", "--reducer horovod")] = {"reducer": "horovod"}
    joining = [f"--min-np {config.min_np}"] * (config.min_np > 1) + ["--grow"] * config.grow
    if joining and not config.elastic:
        missing[requires(" with ".join(joining), "--elastic")] = {"elastic": True}

    def check_all(complete: Config) -> None:
        check(complete, set())
        also_check(complete)

    command_line.require_complete(config, missing, check_all)


def _missing_for_stages(config: RunConfig) -> Missing:
    stages, subject = config.stages, f"--stages {config.stages}"
    if stages == 1 and config.stages_at is not None:
        stages, subject = config.stages_at.count(",") + 2, f"--stages-at {config.stages_at}"
    elif stages == 1 and config.pipeline_schedule != "1f1b":
        stages, subject = 2, f"--pipeline-schedule {config.pipeline_schedule}"
    options = [f"--stages {stages}"] if config.stages < stages else []
    if config.accumulate_steps < stages:  # each stage is to have a micro-batch
        options.append(f"--accumulate-steps {stages} or more")
    return {requires(subject, *options): {"stages": stages}} if options else {}


def _missing_for_sync(config: RunConfig) -> Missing:
    if config.sync == "local":
        steps = "--sync-every 16, the steps of a round, or 16@5 to begin after 5 epochs"
        return {} if config.sync_every is not None else {requires("--sync local", steps): {}}
    if config.sync_every is not None:
        return {requires(f"--sync-every {config.sync_every}", "--sync local"): {"sync": "local"}}
    if config.sync == "flat" and config.sync_group_size is not None:
        choice = "--sync two-level, or --sync local --sync-every 16"
        return {requires(f"--sync-group-size {config.sync_group_size}", choice): {"sync": "two-level"}}
    return {}


def sent_at_once_mb(config: RunConfig) -> float | None:
    """MiB of gradients, 0 for each alone; None leaves it to Horovod."""
    if config.deterministic:
        return 0.0
    default = BUCKET_MB if config.reducer == "bucket" else None
    return default if config.fusion_threshold_mb is None else config.fusion_threshold_mb


def _refuse(refused: Mapping[str, bool], *, beside: str) -> None:
    """Raise BadInput where one of these is given."""
    for other, is_given in refused.items():
        if is_given:
            raise BadInput(f"{other} does not work with {beside}: leave one of them out")


def power_rank(compression: str | None) -> int | None:
    """R of powersgd:R; None of anything else."""
    found = re.fullmatch(r"powersgd:([1-9]\d{0,4})", compression or "", re.ASCII)
    return None if found is None else int(found[1])


def _check_compression(config: RunConfig) -> None:
    """Raise BadInput for a --compression that there is not, or that does not go with the rest."""
    option = f"--compression {config.compression}"
    if config.compression in (None, "none", "fp16"):
        return
    if power_rank(config.compression) is None:
        raise BadInput(f"{option}: choose none, fp16 or powersgd:R, as powersgd:2")
    refused = {
        "--precision fp16": config.precision == "fp16",  # what was left out has the loss's scale of then
        f"--sync {config.sync}": config.sync != "flat",
        "--reducer horovod": config.reducer == "horovod",
        "--fusion-threshold-mb": config.fusion_threshold_mb is not None,
    }
    _refuse(refused, beside=option)


def _check_parts(config: RunConfig) -> None:
    """Raise BadInput for what does not go with replicas of several ranks."""
    part, count = config.parts
    if part == "all":
        return
    option = f"{OPTIONS[part]} {count}"
    refused = {
        "--compile": config.compile,
        f"--compression {config.compression}": power_rank(config.compression) is not None,
        "--find-nan": config.find_nan,  # without it a part of a replica is named, too
        "--precision fp16": config.precision == "fp16",
        "--profile exact": config.profile == "exact",
        f"--sync {config.sync}": config.sync != "flat",
        "--timeline": config.timeline,
    }
    _refuse(refused, beside=option)


def _check_elastic(config: RunConfig) -> None:
    """Raise BadInput for what cannot go on without one of its ranks."""
    if not config.elastic:
        return
    part, count = config.parts
    refused = {
        f"{OPTIONS[part]} {count}": part != "all",
        f"--sync {config.sync}": config.sync != "flat",
        "--reducer horovod": config.reducer == "horovod",
        # Each rank's own rest of a sum would be lost with it.
        f"--compression {config.compression}": power_rank(config.compression) is not None,
        "--profile exact": config.profile == "exact",
        "--timeline": config.timeline,
    }
    _refuse(refused, beside="--elastic")


def rounds(config: RunConfig) -> Every | None:
    """The rounds of --sync local; None where all ranks are together at every step."""
    if config.sync != "local" or config.sync_every is None:
        return None
    steps, _, epoch = config.sync_every.partition("@")
    return None if steps == "1" else Every(steps=int(steps), from_epoch=int(epoch or 0))


def _check_sync(config: RunConfig) -> None:
    """Raise BadInput for settings of --sync that cannot go together."""
    refused = {
        "--compression fp16": config.compression == "fp16" and config.sync == "two-level",  # it is of the groups alone
        "--profile exact": config.profile == "exact" and config.sync == "local",  # all ranks meet after each part
        "--timeline": config.timeline and config.sync != "flat",
    }
    _refuse(refused, beside=f"--sync {config.sync}")
    if config.sync_every is None:
        return
    if re.fullmatch(r"[1-9]\d{0,8}(@\d{1,8})?", config.sync_every, re.ASCII) is None:
        raise BadInput(
            f"--sync-every {config.sync_every}: give the steps of a round as --sync-every 16, or 16@5 to begin after 5 "
            "epochs"
        )
    every = rounds(config)
    if every is not None and every.from_epoch >= config.epochs:
        raise BadInput(f"--sync-every {config.sync_every} begins after the last of {config.epochs} epochs: give fewer")
