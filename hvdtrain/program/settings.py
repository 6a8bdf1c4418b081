"""The settings that every program has, and its command line."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Annotated, ClassVar, TypeVar

from hvdtrain.checkpoint.settings import CheckpointSettings
from hvdtrain.core.settings import FileSettings, LimitSettings, PrecisionSettings
from hvdtrain.insight.costs.settings import CostSettings
from hvdtrain.insight.profiling.settings import ProfileSettings, with_trace
from hvdtrain.insight.tracking.settings import RunSettings
from hvdtrain.loop.witnesses.settings import WitnessSettings
from hvdtrain.parallel.stages.settings import StageSettings
from hvdtrain.parallel.sync.settings import SyncSettings
from hvdtrain.ranks.comm import BUCKET_MB
from hvdtrain.recipe.settings import OptimizerSettings
from hvdtrain.settings import command_line, group
from hvdtrain.settings.notes import NEUTRAL, SHAPES, Auto, Column, auto_fields, columns, marked
from hvdtrain.settings.safety.exits import BadInput


@dataclass(frozen=True, kw_only=True)
class Settings(  # the last base comes first in --help and config.json, in the field order of dataclasses
    RunSettings,
    CostSettings,
    ProfileSettings,
    FileSettings,
    WitnessSettings,
    LimitSettings,
    CheckpointSettings,
    SyncSettings,
    PrecisionSettings,
    OptimizerSettings,
    StageSettings,
):
    """How any model is trained, recorded and saved; a program adds its data and its model.

    >>> from dataclasses import dataclass
    >>> @dataclass(frozen=True, kw_only=True)
    ... class Settings(hvdtrain.Settings):
    ...     width: int = 8
    >>> Settings(epochs=4, lr=0.1, width=16)
    Settings(epochs=4, lr=0.1, width=16)
    """

    title: ClassVar[str] = "the program"
    FOR_CPUS: ClassVar[str] = ""  # a remedy with a command, if an epoch would take long on CPUs
    # Shown by --help, with the options that a program adds.
    MOST_USED: ClassVar[tuple[str, ...]] = (
        *("recipe", "data", "data_dir", "model", "epochs", "batch_size_per_rank", "global_batch_size"),
        *("optimizer", "lr", "precision", "seed", "runs_dir", "run", "profile"),
    )

    recipe: Annotated[str, Column(first=True)] = "default"
    """Source of the other defaults, for programs that have several."""
    model: Annotated[
        str,
        SHAPES,
        Column(first=True),
        Auto(why="the program's settings do not declare a model", unless_declared=True),
    ] = "default"
    """Name of the model, for programs that have several."""

    @property
    def sent_at_once_mb(self) -> float | None:
        """MiB of gradients sent at once, 0 for each gradient alone; None leaves it to Horovod."""
        if self.deterministic:
            return 0.0
        default = None if self.reducer == "horovod" else BUCKET_MB
        return default if self.fusion_threshold_mb is None else self.fusion_threshold_mb


S = TypeVar("S", bound=Settings)


def compared(kind: type[Settings]) -> tuple[str, ...]:
    """Return the columns for comparing runs: the program's own options first, unless it marks its columns itself."""
    not_options, columns_of_all = auto_fields(kind), columns(kind)
    own = [field.name for field in fields(kind) if field.name not in {known.name for known in fields(Settings)}]
    if not set(own).isdisjoint(columns_of_all):
        own = []
    neutral = {*marked(kind, NEUTRAL), *not_options}
    return tuple(name for name in (*own, *columns_of_all) if name not in neutral)


def parse(
    argv: Sequence[str],
    recipes: Iterable[Callable[[], S]],
    resolve: Callable[[S, set[str]], S] = lambda settings, _: settings,
) -> S:
    """Parse a command line; BadInput for values that cannot work on any machine.

    `recipes` return the defaults, each with its name as `recipe`; the first is used without --recipe. A settings class
    is a recipe, too. `resolve` derives further settings from the fields that were given.
    """
    recipes = list(recipes)
    if not recipes or not all(map(callable, recipes)):
        raise BadInput(
            "hvdtrain.start(main): needs a class of settings, or functions that return settings. Write "
            "hvdtrain.start(main, hvdtrain.Settings)."
        )
    by_name = {recipe().recipe: recipe for recipe in recipes}
    for kind in {type(recipe()) for recipe in by_name.values()}:
        if "__dataclass_fields__" not in vars(kind):  # else its fields would not be options
            raise BadInput(
                f"class {kind.__name__}: not a dataclass. Write @dataclass(frozen=True, kw_only=True) above it."
            )
        options = {field.name for field in fields(kind)} - {field.name for field in fields(Settings)}
        for name in sorted(options & set(dir(Settings))):  # it would shadow the method
            raise BadInput(
                f"class {kind.__name__}: hvdtrain.Settings uses the name {name!r}. Call the field otherwise."
            )
    settings, given = command_line.parse(argv, by_name, prog=_command())
    settings = with_trace(settings)
    if "batch_size_per_rank" in given and settings.batch_size_per_rank != "auto" and "global_batch_size" not in given:
        settings = replace(settings, global_batch_size=None)  # the recipe's
    group.check(settings, given)
    group.require_complete(settings)
    return resolve(settings, given)


def _command() -> str:
    """Return the command that started this program."""
    spec = sys.modules["__main__"].__spec__
    return f"python {sys.argv[0]}" if spec is None else f"python -m {spec.name.removesuffix('.__main__')}"
