"""Batches, precision, limits, and files that are read: settings that every run has."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from hvdtrain.safety.exits import BadInput
from hvdtrain.settings.capabilities import Capability, Use
from hvdtrain.settings.group import Group
from hvdtrain.settings.notes import ASIDE, AT_LEAST_0, AT_LEAST_1, COLUMN, SEED, SHAPES, Chosen, Column, Rule

COUNT_OR_AUTO = Rule(holds=lambda value: value == "auto" or value >= 1, text="must be auto, or at least 1")


@dataclass(frozen=True, kw_only=True)
class BatchSettings(Group):
    """How samples are visited."""

    title: ClassVar[str] = "batches"

    epochs: Annotated[int, AT_LEAST_1, COLUMN] = 25
    """Times that each sample is visited."""
    batch_size_per_rank: Annotated[int | Literal["auto"], COUNT_OR_AUTO] = 256
    """Samples that a rank takes through the model at a time; with global-batch-size, auto for as many as fit into the
    memory of all ranks, and more accumulate-steps for the rest."""
    global_batch_size: Annotated[int | None, AT_LEAST_1, Column(value="global_batch", first=True)] = None
    """Samples per optimizer step of all ranks together, instead of batch-size-per-rank."""
    accumulate_steps: Annotated[int, AT_LEAST_1] = 1
    """Batches per optimizer step; global batch = ranks x batch-size-per-rank x accumulate-steps, at most: an epoch is
    cut evenly."""
    seed: Annotated[int, SEED, SHAPES, COLUMN] = 0
    """Of the first weights, of the order of samples and of all else that is random."""

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
        if self.batch_size_per_rank == "auto":  # each rank tries it with a forward and backward pass of its own
            yield Use(
                option="--batch-size-per-rank auto",
                takes=(Capability.LAYERS,),
                needs=(Capability.BACKWARD, Capability.BATCH),
            )


@dataclass(frozen=True, kw_only=True)
class PrecisionSettings(Group):
    """How numbers are computed."""

    title: ClassVar[str] = "precision and compilation"

    precision: Annotated[Literal["fp32", "bf16", "fp16"], COLUMN] = "fp32"
    """Of the forward and backward pass; the weights stay in fp32. fp16 needs a GPU."""
    tf32: bool = True
    """Multiply in TF32 (a mantissa of 10 bits) where fp32 is computed on a GPU that can."""
    compile: bool = False
    """torch.compile the model."""
    deterministic: bool = False
    """Weights that are bit-equal whenever the run is repeated or resumed; slower."""

    def uses(self) -> Iterable[Use]:
        if self.precision == "fp16":
            yield Use(option="--precision fp16", takes=(Capability.UNSCALED,))
        if self.compile:
            yield Use(option="--compile", needs=(Capability.TRACE,))
        if self.deterministic:
            yield Use(option="--deterministic", takes=(Capability.BUCKETS,))


@dataclass(frozen=True, kw_only=True)
class LimitSettings(Group):
    """When a run ends early, and what it checks."""

    title: ClassVar[str] = "limits and checks"

    max_skipped_steps: Annotated[
        int,
        AT_LEAST_1,
        ASIDE,
        Chosen(why="20 skipped steps in a row end a run, and fp16 needs fewer"),
    ] = 20
    """End with status 3 after this number of steps in a row whose loss or gradients were not finite."""
    check_replicas_every: Annotated[
        int, AT_LEAST_0, ASIDE, Chosen(why="replicas are compared at each checkpoint: see --checkpoint-every-steps")
    ] = 0
    """Steps between more comparisons of the parameters of all ranks; 0 for none but those at checkpoints."""
    hang_timeout_s: Annotated[
        float | None,
        AT_LEAST_0,
        ASIDE,
        Chosen(why="the limit of a step is measured: 10 times the median step, at least 60 s"),
    ] = None
    """A step that takes longer ends the run; measured if None, never if 0. Reading files may take ten times as long,
    600 s if None."""


@dataclass(frozen=True, kw_only=True)
class FileSettings(Group):
    """The data, and how their files are read."""

    title: ClassVar[str] = "files that are read"

    data: Annotated[str, SHAPES, COLUMN] = "default"
    """Name of the data, for programs that have several."""
    data_dir: Annotated[Path, ASIDE] = Path("data")
    """The folder of the data."""
    workers: Annotated[
        int | None, AT_LEAST_0, ASIDE, Chosen(why="the program starts one process for each core of the rank")
    ] = None
    """Processes per rank that read files; 0 lets the rank read by itself. Data that fit on the device need none."""
    prefetch: Annotated[int, AT_LEAST_0, ASIDE, Chosen(why="each process that reads files is 2 batches ahead")] = 2
    """Batches of files that each of them reads ahead; 0 lets the rank read each batch when its step begins."""
