"""The settings of hvdtrain.effnet, and the recipes: functions that return settings."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from hvdtrain.program import settings as program
from hvdtrain.program.settings import Settings
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.notes import AT_LEAST_0, COLUMN, NEUTRAL, PROBABILITY, SHAPES, Auto, matching, one_of
from hvdtrain.settings.safety.exits import BadInput

if TYPE_CHECKING:
    from hvdtrain.loop.draft import Job

DATA = ("cifar10", "digits", "imagefolder", "synthetic")
TINY = "efficientnet_tiny"
_SIZES = ("b0", "b1", "b2", "b3", "b4", "b5", "b6", "b7", "v2_l", "v2_m", "v2_s")  # available in torchvision
MODELS = (*(f"efficientnet_{size}" for size in _SIZES), TINY)

# For any number of ranks up to 64.
OFFLINE_COMMAND = "python -m hvdtrain.effnet --data digits --model efficientnet_tiny --global-batch-size 64"


@dataclass(frozen=True, kw_only=True)
class EffnetSettings(Settings):
    """EfficientNet with Horovod; recipe sets the defaults, other options change them."""

    title: ClassVar[str] = "images and their model"
    FOR_CPUS: ClassVar[str] = f"For a training of minutes run {OFFLINE_COMMAND}"
    MOST_USED: ClassVar[tuple[str, ...]] = (*Settings.MOST_USED, "pretrained")

    recipe: str = "scaled"
    """scaled or book: source of the other defaults."""
    data: Annotated[str, one_of(DATA)] = "cifar10"
    """cifar10, digits, imagefolder or synthetic."""
    data_dir: Path = Path("data")
    """Folder of cifar10, which is downloaded if missing; for imagefolder the folder of class folders, or of train/ and
    test/ or val/ with class folders.
    """
    model: Annotated[str, one_of(MODELS)] = "efficientnet_b0"
    """efficientnet_b0 to b7, efficientnet_v2_s, _m or _l, efficientnet_tiny."""
    experiment: str = "effnet"
    pretrained: str | None = None
    """A file of weights, 'hub' for torchvision's, or 'none' to override a recipe."""
    stem_stride: Annotated[
        Literal[1, 2] | None,
        SHAPES,
        Auto(why="images of at most 32 pixels keep their resolution, except for weights of the hub"),
    ] = None
    """1 keeps the resolution of small images."""
    dropout: Annotated[float | None, PROBABILITY] = None
    """Probability; the model's default if not given."""
    stochastic_depth: Annotated[float | None, PROBABILITY] = None
    """Probability at the last block; the model's default if not given."""
    label_smoothing: Annotated[float, PROBABILITY] = 0.1
    """Share of each label that is spread over all classes."""
    normalize: Annotated[bool, Auto(why="the recipe chooses: scaled normalizes images, book does not")] = True
    """Normalize images to mean 0 and deviation 1 per channel of the training split; for imagefolder, with the values of
    the model's weights.
    """
    augment: Annotated[
        str,
        matching(
            r"none|standard|cutout:[1-9]\d{0,8}", "must be none, standard or cutout:16, the side of a black square"
        ),
    ] = "standard"
    """none; standard, a random crop after padding (for imagefolder of a random area and aspect ratio), and a random
    flip if the data allow it; or cutout:16, which also blackens a square of 16 pixels.
    """
    sync_bn: Annotated[bool, COLUMN] = False
    """Batch norm over the images of all ranks; otherwise per rank, with statistics averaged before evaluation."""
    channels_last: Annotated[bool, NEUTRAL, Auto(why="the recipe chooses: scaled with it, book without")] = True
    """Store the channels of a pixel next to each other in memory, which makes convolutions faster."""
    max_unreadable_images: Annotated[
        int | None, AT_LEAST_0, NEUTRAL, Auto(why="a run may fail to decode 100 images, or one of 1,000 that it reads")
    ] = None
    """End with status 1 if more images than this cannot be decoded, over all ranks and epochs; up to this number they
    count as images without a gradient. The run does not start if more images have no readable header.
    """

    @property
    def cutout(self) -> int:
        """The side in pixels of the square to blacken; 0 for none."""
        return int(self.augment.partition(":")[2] or 0)

    def check(self, given: set[str]) -> None:
        if self.data in ("digits", "synthetic") and "data_dir" in given:
            raise BadInput(f"--data-dir {self.data_dir}: --data {self.data} reads no files. Pass --data imagefolder.")

    def uses(self) -> Iterable[Use]:
        if self.sync_bn:  # it communicates inside the model
            yield Use(option="--sync-bn", takes=(Capability.TRACE,), needs=(Capability.LAYERS,))

    def check_job(self, job: "Job") -> None:
        if self.sync_bn and job.sizes.micro_batch < 2:
            raise BadInput("--sync-bn: a batch of 1 per rank leaves nothing to normalise. Use at least 2.")

    def place(self, job: "Job") -> None:
        from hvdtrain.recipe.sync_batch_norm import convert

        if self.sync_bn:  # bases come first: if the model is cut, rank 0 has measured it without other ranks
            convert(job.model, job.comm.data)


def unreadable_limit(settings: EffnetSettings, images: int) -> int:
    """Return how many images of all epochs may fail to be decoded, for a training split of `images` images."""
    chosen = max(100, settings.epochs * images // 1000)
    return chosen if settings.max_unreadable_images is None else settings.max_unreadable_images


def scaled() -> EffnetSettings:
    """Keeps its accuracy as the global batch grows (Goyal et al. 2017, and the moving average of Tan and Le 2019)."""
    return EffnetSettings()


def book() -> EffnetSettings:
    """The usual textbook settings, which lose accuracy as ranks are added: Adam at one rate for every global batch."""
    return EffnetSettings(
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
        augment="none",
        channels_last=False,
    )


RECIPES = {"scaled": scaled, "book": book}


def parse(argv: Sequence[str]) -> EffnetSettings:
    """Parse a command line; BadInput for values that cannot work on any machine."""
    return program.parse(argv, RECIPES.values(), resolve)


def resolve(settings: EffnetSettings, _: set[str]) -> EffnetSettings:
    """Derive further settings from the fields that were given."""
    return replace(settings, pretrained=None) if settings.pretrained == "none" else settings
