"""Settings of every run: batches, precision, limits, and input files."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import AT_LEAST_0, AT_LEAST_1, COLUMN, NEUTRAL, SEED, SHAPES, Auto, Column, Rule
from hvdtrain.settings.safety.exits import BadInput

COUNT_OR_AUTO = Rule(holds=lambda value: value == "auto" or value >= 1, text="must be auto, or at least 1")


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Group):
    """Batches of samples, and the seed."""

    title: ClassVar[str] = "batches"

    epochs: Annotated[int, AT_LEAST_1, COLUMN] = 25
    """Times that each sample is visited."""
    batch_size_per_rank: Annotated[int | Literal["auto"], COUNT_OR_AUTO] = 256
    """Samples of one forward and backward pass of a rank. With global-batch-size, auto uses as many as fit into the
    memory of all ranks, and more accumulate-steps for the rest.
    """
    global_batch_size: Annotated[int | None, AT_LEAST_1, Column(value="global_batch", first=True)] = None
    """Samples per optimizer step over all ranks, instead of batch-size-per-rank."""
    accumulate_steps: Annotated[int, AT_LEAST_1] = 1
    """Batches per optimizer step. Global batch = ranks x batch-size-per-rank x accumulate-steps at most, because an
    epoch is divided evenly.
    """
    seed: Annotated[int, SEED, SHAPES, COLUMN] = 0
    """Seed of the initial weights, the order of samples and all other random numbers."""

    def check(self, given: set[str]) -> None:
        if self.batch_size_per_rank == "auto":
            if self.global_batch_size is None:  # the training would depend on the memory
                raise BadInput("--batch-size-per-rank auto requires --global-batch-size.")
        elif {"global_batch_size", "batch_size_per_rank"} <= given:
            raise BadInput(
                f"--global-batch-size {self.global_batch_size} and --batch-size-per-rank {self.batch_size_per_rank} "
                "both set the batch. Use only one."
            )

    def uses(self) -> Iterable[Use]:
        if self.batch_size_per_rank == "auto":  # each rank tries it with its own forward and backward pass
            yield Use(
                option="--batch-size-per-rank auto",
                takes=(Capability.LAYERS,),
                needs=(Capability.BACKWARD,),
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(Group):
    """How numbers are computed."""

    title: ClassVar[str] = "precision and compilation"

    precision: Annotated[Literal["tf32", "fp32", "bf16", "fp16"], COLUMN] = "tf32"
    """Precision of the forward and backward pass; the weights stay in fp32. tf32 multiplies fp32 matrices in TF32
    (10-bit mantissa) on GPUs that support it, and is fp32 elsewhere. fp16 needs a GPU.
    """
    compile: bool = False
    """Compile the model with torch.compile."""
    deterministic: bool = False
    """Bit-identical weights whenever the run is repeated or resumed; slower."""

    def uses(self) -> Iterable[Use]:
        if self.precision == "fp16":
            yield Use(option="--precision fp16", takes=(Capability.UNSCALED,))
        if self.compile:
            yield Use(option="--compile", needs=(Capability.TRACE,))
        if self.deterministic:
            yield Use(option="--deterministic", takes=(Capability.BUCKETS,))


@dataclass(frozen=True, kw_only=True)
class LimitSettings(Group):
    """Limits that end a run, and checks during the run."""

    title: ClassVar[str] = "limits and checks"

    max_skipped_steps: Annotated[
        int,
        AT_LEAST_1,
        NEUTRAL,
        Auto(why="20 skipped steps in a row end a run, and fp16 needs fewer"),
    ] = 20
    """End with status 3 after this number of consecutive steps with a loss or gradients that were not finite."""
    check_replicas_every: Annotated[
        int, AT_LEAST_0, NEUTRAL, Auto(why="replicas are compared at each checkpoint: see --checkpoint-every")
    ] = 0
    """Steps between additional comparisons of the parameters of all ranks; 0: compare only at checkpoints."""
    hang_timeout_s: Annotated[
        float | None,
        AT_LEAST_0,
        NEUTRAL,
        Auto(why="the limit of a step is measured: 10 times the median step, at least 60 s"),
    ] = None
    """Time limit of a step, after which the run ends; measured if None, no limit if 0. Reading files may take ten times
    as long, 600 s if None.
    """


@dataclass(frozen=True, kw_only=True)
class FileSettings(Group):
    """The data, and the processes that read files."""

    title: ClassVar[str] = "files that are read"

    data: Annotated[
        str,
        SHAPES,
        COLUMN,
        Auto(why="the program's settings do not declare a data set", unless_declared=True),
    ] = "default"
    """Name of the data, for programs that have several."""
    data_dir: Annotated[Path, NEUTRAL] = Path("data")
    """Folder of the data."""
    workers: Annotated[
        int | None, AT_LEAST_0, NEUTRAL, Auto(why="the program starts one process for each core of the rank")
    ] = None
    """Processes per rank that read files; 0: the rank itself reads. Not needed for data that fit on the device."""
    prefetch: Annotated[int, AT_LEAST_0, NEUTRAL, Auto(why="each process that reads files is 2 batches ahead")] = 2
    """Batches of files that each process prefetches; 0: the rank reads each batch when its step begins."""
