"""The settings of hvdtrain.effnet, and the recipes: functions that return settings."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings import command_line, options
from hvdtrain.settings.command_line import AT_LEAST_0, PROBABILITY
from hvdtrain.settings.options import RunConfig

DATA = ("cifar10", "digits", "imagefolder", "synthetic")
TINY = "efficientnet_tiny"
_SIZES = ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "v2_l", "v2_m", "v2_s")  # those that torchvision has
MODELS = (*(f"efficientnet_{size}" for size in _SIZES), TINY)


@dataclass(frozen=True, kw_only=True)
class EffnetConfig(RunConfig):
    """EfficientNet with Horovod; recipe sets the defaults, other options change them."""

    SHAPING: ClassVar[tuple[str, ...]] = (*RunConfig.SHAPING, "stem_stride")
    COLUMNS: ClassVar[tuple[str, ...]] = (*RunConfig.COLUMNS, "sync_bn", "seed")

    MOST_USED: ClassVar[tuple[str, ...]] = (
        "recipe",
        "data",
        "data_dir",
        "model",
        "pretrained",
        "epochs",
        "batch_size_per_rank",
        "global_batch_size",
        "optimizer",
        "lr",
        "precision",
        "seed",
        "runs_dir",
        "run",
        "profile",
    )
    GROUPS: ClassVar[Mapping[str, str]] = {**RunConfig.GROUPS, "pretrained": "images and their model"}

    recipe: str = "scaled"
    """scaled or book: where the other defaults come from."""
    data: str = "cifar10"
    """cifar10, digits, imagefolder or synthetic."""
    data_dir: Path = Path("data")
    """Where cifar10 is kept or downloaded to; for imagefolder the folder of class folders."""
    model: str = "efficientnet_b0"
    """efficientnet_b0 to b7, efficientnet_v2_s, _m or _l, efficientnet_tiny."""
    experiment: Annotated[str, command_line.FOLDER_NAME] = "effnet"
    """The folder below runs-dir that has the runs."""
    pretrained: str | None = None
    """A file of weights, 'hub' for torchvision's, or 'none', where a recipe has some."""
    stem_stride: Literal[1, 2] = 2
    """1 keeps the resolution of small images."""
    dropout: Annotated[float | None, PROBABILITY] = None
    """Probability; the model's own if not given."""
    stochastic_depth: Annotated[float | None, PROBABILITY] = None
    """Probability at the last block; the model's own if not given."""
    label_smoothing: Annotated[float, PROBABILITY] = 0.1
    """Share of each label that is spread over all classes."""
    normalize: bool = True
    """Give the images the training split's mean 0 and deviation 1 per channel; for imagefolder those of the model's
    weights."""
    augment: bool = True
    """Random crop after padding, for imagefolder of a random part and shape, and random flip where the data bear it."""
    cutout: Annotated[int, AT_LEAST_0] = 0
    """Side in pixels of a square to blacken; 0 for none."""
    sync_bn: bool = False
    """Batch norm over the images of all ranks; without it each rank's own, averaged before evaluation."""
    channels_last: bool = True
    """Keep the channels of a pixel side by side in memory, which convolutions are faster with."""
    max_unreadable_images: Annotated[int, AT_LEAST_0] = 100
    """End with status 1 after more than so many images, of all ranks and epochs, that could not be decoded; else they
    count as images without a gradient. Where more would come for want of a readable header, the run does not start."""


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


RECIPES = {"scaled": scaled, "book": book}


def parse(argv: Sequence[str]) -> EffnetConfig:
    """The settings of a command line; BadInput for what cannot work whatever the machine."""
    config, given = command_line.parse(argv, RECIPES, recipe="scaled", prog="python -m hvdtrain.effnet")
    if config.model not in MODELS:
        raise BadInput(f"--model {config.model!r} is unknown: choose one of {', '.join(MODELS)}")
    if config.data not in DATA:
        raise BadInput(f"--data {config.data!r} is unknown: choose one of {', '.join(DATA)}")
    options.check(config, given)
    _check_sync_bn(config)
    options.require_complete(config, _check_sync_bn)
    return replace(config, pretrained=None) if config.pretrained == "none" else config


def _check_sync_bn(config: EffnetConfig) -> None:
    if config.sync_bn and config.compile:
        raise BadInput("--sync-bn sums over ranks inside the model, which --compile cannot trace: leave one out")
    if config.sync_bn and config.recompute:
        raise BadInput("--sync-bn sums over ranks inside the model, which --recompute would do twice: leave one out")
    if config.sync_bn and config.stages > 1:
        raise BadInput(f"--sync-bn does not work with --stages {config.stages}: leave one of them out")
    if config.sync_bn and options.rounds(config) is not None:
        raise BadInput("--sync-bn asks all ranks at every layer, and --sync local keeps hosts apart: leave one out")
