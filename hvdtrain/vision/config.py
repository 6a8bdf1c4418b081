"""The settings of hvdtrain.effnet, its command line, and the recipes: functions that return settings."""

import contextlib
import io
import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import tyro

from hvdtrain.safety.exits import BadInput, launched_rank
from hvdtrain.vision import images as data
from hvdtrain.vision import models


@dataclass(frozen=True, kw_only=True)
class EffnetConfig:
    """EfficientNet with Horovod; recipe sets the defaults, other options change them."""

    data: str = "cifar10"
    """cifar10, digits, imagefolder or synthetic."""
    data_dir: Path = Path("data")
    """Where cifar10 is kept or downloaded to; for imagefolder the folder of class folders."""
    model: str = "efficientnet_b0"
    """efficientnet_b0 to b7, efficientnet_v2_s, _m or _l, efficientnet_tiny."""
    pretrained: str | None = None
    """A file of weights, or 'hub' for torchvision's."""
    stem_stride: Literal[1, 2] = 2
    """1 keeps the resolution of small images."""
    dropout: float | None = None
    """Probability; the model's own if not given."""
    stochastic_depth: float | None = None
    """Probability at the last block; the model's own if not given."""
    recipe: str = "scaled"
    """scaled or book: where the other defaults come from."""
    epochs: int = 25
    batch_size_per_rank: int = 256
    """Images that a rank takes through the model at a time."""
    global_batch_size: int | None = None
    """Images per optimizer step of all ranks together, in place of batch-size-per-rank."""
    accumulate_steps: int = 1
    """Batches per optimizer step; global batch = ranks x batch-size-per-rank x accumulate-steps."""
    optimizer: Literal["sgd", "rmsprop", "adam", "adamw", "lars", "lamb"] = "sgd"
    lr: float | None = None
    """For a global batch of 256; the optimizer's usual one if not given."""
    scale_lr: bool = True
    """Follow the global batch: linear for sgd, rmsprop and lars, square root for adam, adamw and lamb."""
    schedule: Literal["cosine", "constant"] = "cosine"
    warmup_epochs: float = 5.0
    weight_decay: float = 5e-4
    decay_all: bool = False
    """Decay batch norms and biases as well."""
    label_smoothing: float = 0.1
    ema_epochs: float = 2.0
    """Memory of the moving average of the weights that is evaluated; 0 evaluates the weights themselves."""
    normalize: bool = True
    """Give the images the training split's mean 0 and deviation 1 per channel."""
    augment: bool = True
    """Random crop after padding, and random flip where the data bear it."""
    cutout: int = 0
    """Side in pixels of a square to blacken; 0 for none."""
    sync_bn: bool = False
    """Batch norm over the images of all ranks; without it each rank's own, averaged before evaluation."""
    max_skipped_steps: int = 20
    """End with status 3 after so many steps in a row whose loss or gradients were not finite."""
    max_unreadable_images: int = 100
    """End with status 1 after so many images, of all ranks and epochs, that could not be decoded; else they count as
    images without a gradient."""
    check_replicas_every: int = 0
    """Steps between comparisons of the parameters' hashes over ranks; 0 for never."""
    clip_value: float | None = None
    """Largest absolute value of a gradient element."""
    clip_norm: float | None = None
    """Largest norm of all gradients together, after clip-value."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    channels_last: bool = True
    compile: bool = False
    """torch.compile the model."""
    compression: Literal["none", "fp16"] | None = None
    """How gradients travel; fp16 on GPUs and none on CPUs if not given."""
    fusion_threshold_mb: float | None = None
    """MiB of gradients that Horovod sends at once; the measured best if not given."""
    fusion_groups: int | None = None
    """Send the gradients in this many fixed groups; as they come if not given."""
    cycle_time_ms: float | None = None
    """Pause between Horovod's rounds; Horovod's own if not given."""
    deterministic: bool = False
    """Weights that are bit-equal whenever the run is repeated or resumed; slower."""
    resume: Literal["auto", "never"] = "auto"
    """auto goes on from the run's newest valid checkpoint, if it has any; never starts anew."""
    checkpoint_every_s: float = 300.0
    """Seconds between checkpoints; 0 for none by the clock."""
    checkpoint_every_steps: int | None = None
    """Steps between checkpoints, besides those by the clock."""
    keep: int = 2
    """Newest checkpoints to keep; the best weights are kept apart."""
    hang_timeout_s: float | None = None
    """A step that takes longer ends the run; 10 times the median step and at least 60 if not given, 0 for never."""
    report_every_steps: int = 20
    """Steps between reports to TensorBoard and metrics.jsonl; an epoch's end is always one."""
    profile: Literal["off", "on", "exact"] = "off"
    """on (the option alone says it) measures the phases of each step; exact waits for the GPU between them."""
    torch_profile: int | None = None
    """Steps to trace with torch.profiler into profile/ of the run folder."""
    timeline: bool = False
    """Write Horovod's timeline.json into the run folder; a thread of its own spins meanwhile."""
    seed: int = 0
    runs_dir: Path = Path("runs")
    experiment: str = "effnet"
    run: str | None = None
    """Name of the run; date and time if not given."""
    overwrite: bool = False
    """Replace a finished run of the same name."""


def scaled() -> EffnetConfig:
    """Keeps its accuracy as the global batch grows (Goyal et al. 2017, and the moving average of Tan and Le 2019)."""
    return EffnetConfig()


def book() -> EffnetConfig:
    """The usual textbook settings, whose accuracy falls as ranks are added: Adam at one rate for every global batch."""
    return EffnetConfig(
        recipe="book",
        model="efficientnet_b7",
        pretrained="hub",
        optimizer="adam",
        lr=1e-4,
        scale_lr=False,
        schedule="constant",
        warmup_epochs=0.0,
        weight_decay=0.005,
        decay_all=True,
        label_smoothing=0.0,
        ema_epochs=0.0,
        normalize=False,
        augment=False,
        channels_last=False,
    )


RECIPES: dict[str, Callable[[], EffnetConfig]] = {"scaled": scaled, "book": book}


def parse(argv: Sequence[str]) -> EffnetConfig:
    """The settings of a command line; BadInput for what cannot work whatever the machine."""
    name = _recipe_named(argv)
    if name not in RECIPES:
        raise BadInput(f"--recipe {name!r} is unknown: choose one of {', '.join(RECIPES)}")
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            config = tyro.cli(
                EffnetConfig,
                prog="python -m hvdtrain.effnet",
                args=_with_profile_on(argv),
                default=replace(RECIPES[name](), seed=_seed_of_launcher()),
                console_outputs=launched_rank() == 0 or not {"-h", "--help"} & set(argv),
            )
    except SystemExit as leaving:
        if leaving.code in (0, None):
            raise
        raise BadInput(f"{_one_line(complaint.getvalue())}; see --help") from None
    given = {word.partition("=")[0].replace("_", "-") for word in argv}
    if {"--global-batch-size", "--batch-size-per-rank"} <= given:
        raise BadInput(
            f"--global-batch-size {config.global_batch_size} and --batch-size-per-rank {config.batch_size_per_rank} "
            "both set the batch: give one of them"
        )
    check(config)
    return config


def check(config: EffnetConfig) -> None:
    """Raise BadInput, naming field, value and remedy, for a value that no data and no machine could make right."""
    if config.model not in models.MODELS:
        raise BadInput(f"--model {config.model!r} is unknown: choose one of {', '.join(models.MODELS)}")
    if config.data not in data.NAMES:
        raise BadInput(f"--data {config.data!r} is unknown: choose one of {', '.join(data.NAMES)}")
    for field in (
        "epochs", "batch_size_per_rank", "global_batch_size", "accumulate_steps", "max_skipped_steps", "fusion_groups",
        "report_every_steps", "torch_profile", "checkpoint_every_steps", "keep",
    ):  # fmt: skip
        value = getattr(config, field)
        if value is not None and value < 1:
            raise BadInput(f"{_option(field)} {value} must be at least 1")
    for field in ("lr", "clip_value", "clip_norm", "fusion_threshold_mb", "cycle_time_ms"):
        value = getattr(config, field)
        smallest_allowed = field == "fusion_threshold_mb" and value == 0  # means: no fusion
        if value is not None and not 0 < value < math.inf and not smallest_allowed:
            raise BadInput(f"{_option(field)} {value} must be a number greater than 0; leave it out for the default")
    for field in (
        "warmup_epochs", "weight_decay", "ema_epochs", "cutout", "seed", "check_replicas_every", "checkpoint_every_s",
        "hang_timeout_s", "max_unreadable_images",
    ):  # fmt: skip
        value = getattr(config, field)
        if value is not None and not 0 <= value < math.inf:
            raise BadInput(f"{_option(field)} {getattr(config, field)} must be a number of at least 0")
    if config.deterministic and config.fusion_threshold_mb:
        raise BadInput(
            f"--deterministic sums each gradient by itself, --fusion-threshold-mb {config.fusion_threshold_mb} several "
            "at once: leave one of them out"
        )
    if config.seed >= 2**32:
        raise BadInput(f"--seed {config.seed} must be less than 2**32")
    for field in ("dropout", "stochastic_depth", "label_smoothing"):
        value = getattr(config, field)
        if value is not None and not 0 <= value < 1:
            raise BadInput(f"{_option(field)} {value} must be at least 0 and less than 1")
    if config.optimizer in ("lars", "lamb") and config.precision == "fp16":
        raise BadInput(
            f"--optimizer {config.optimizer} divides by gradient norms, which --precision fp16 rounds to 0: "
            "use bf16 or fp32"
        )
    for field in ("experiment", "run"):
        value = getattr(config, field)
        if value is not None and (value in ("", ".", "..") or "/" in value or not value.isprintable()):
            raise BadInput(f"{_option(field)} {value!r} must be one folder's name: put its parents into --runs-dir")


def _seed_of_launcher() -> int:
    """The seed where --seed is not given: a sweep sets it, another one for each run of a size."""
    seed = os.environ.get("HVDLAUNCH_SEED", str(EffnetConfig.seed))
    if not (seed.isascii() and seed.isdecimal()):
        raise BadInput(f"HVDLAUNCH_SEED {seed!r} must be a number of at least 0: correct it in the environment")
    return int(seed)


def _option(field: str) -> str:
    return "--" + field.replace("_", "-")


def _recipe_named(argv: Sequence[str]) -> str:
    name = EffnetConfig.recipe
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue=name):
        if word == "--recipe":
            name = following
        elif word.startswith("--recipe="):
            name = word.removeprefix("--recipe=")
    return name


def _with_profile_on(argv: Sequence[str]) -> list[str]:
    """The words, with `on` after a --profile that stands alone."""
    words: list[str] = []
    for word, following in itertools.zip_longest(argv, argv[1:], fillvalue="--"):
        words += [word, "on"] if word == "--profile" and following.startswith("-") else [word]
    return words


def _one_line(boxed: str) -> str:
    """The message in tyro's box: its lines up to the first rule."""
    words: list[str] = []
    for line in boxed.splitlines()[1:]:
        text = line.strip("│ ")
        if set(text) <= set("─╰╯"):
            break
        words.append(text)
    return " ".join(words)
