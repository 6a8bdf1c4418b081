"""The cost of a step, as JSON for other programs and as text for the user."""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Literal

from hvdtrain.insight.costs.devices import Device
from hvdtrain.insight.costs.roofline import Roofline

Bound = Literal["launch", "memory", "arithmetic"]

# Part of a GPU's memory reserved for CUDA's context and the workspaces of cuDNN and cuBLAS.
RESERVED_BYTES = 2**30
# Multiples of a launch's time for a faster and a slower host.
FAST_HOST, SLOW_HOST = 0.5, 2.0
CANNOT_SEE = (
    "what cuDNN and cuBLAS start inside: their choice of kernels, workspaces, changes of layout",
    "fragmentation of the GPU's memory",
    "reading and decoding of data, and copies from the host",
    "gradients on their way between ranks, and waits for other ranks",
    "evaluations and checkpoints",
)


@dataclass(frozen=True, kw_only=True)
class StepMemory:
    """Bytes on the GPU at the peak of a step; the parts add up to the total."""

    parameters: int
    gradients: int
    optimizer: int  # momenta and squares
    average: int  # the moving average of the parameters
    activations: int  # everything else: saved for and made by backward, buffers, the batch, data on the device
    total: int


@dataclass(frozen=True, kw_only=True)
class DeviceCost:
    """The cost of a step on one GPU."""

    name: str
    memory_bytes: int
    roofline_s: float  # if each kernel performed like a well-tuned one
    step_s: float  # expected: slower, by the median of published steps
    low_s: float  # the fastest of measured steps; for a launch-bound step, the time with a fast host
    high_s: float
    bound: Bound
    samples_per_s: float  # at step_s
    fits: bool
    largest_batch_per_rank: int


@dataclass(frozen=True, kw_only=True)
class Cost:
    """The cost of one step of one rank."""

    program: str
    model: str
    unit: str
    precision: str
    batch_size_per_rank: int
    micro_batches: int
    parameters: int
    gradient_tensors: int
    gradient_bytes: int  # as sent
    operations: int
    kernels: int
    flops: int
    bytes: int
    memory_bytes: StepMemory
    sharded_bytes: int  # of the optimizer and the average, if several ranks divide them
    devices: tuple[DeviceCost, ...]
    cannot_see: tuple[str, ...] = CANNOT_SEE

    def to_json(self) -> str:
        """Return one line of JSON."""
        return json.dumps({"dry_run": 1, **asdict(self)})


def cost_on(
    device: Device, time: Roofline, *, samples: int, batch: int, total_bytes: int, per_sample: float, at_most: int
) -> DeviceCost:
    """Return the cost of a step of `samples` on a device; see `largest_batch` for the rest."""
    shares = device.shares
    step_s = time.step_s(shares.expected)
    busiest: Bound = "memory" if time.memory_s >= time.arithmetic_s else "arithmetic"
    return DeviceCost(
        name=device.name,
        memory_bytes=device.memory_bytes,
        roofline_s=time.step_s(),
        step_s=step_s,
        low_s=time.step_s(shares.high, host=FAST_HOST),
        high_s=time.step_s(shares.low, host=SLOW_HOST),
        bound="launch" if step_s == time.launch_s else busiest,
        samples_per_s=samples / step_s,
        fits=total_bytes <= usable_bytes(device),
        largest_batch_per_rank=largest_batch(device, batch, total_bytes, per_sample=per_sample, at_most=at_most),
    )


def usable_bytes(device: Device) -> int:
    """Return the part of a GPU's memory that a step may use."""
    return device.memory_bytes - RESERVED_BYTES


def largest_batch(device: Device, samples: int, total_bytes: int, *, per_sample: float, at_most: int) -> int:
    """Return the largest micro-batch that fits, from the bytes of a step of `samples` and of each further sample."""
    more = int((usable_bytes(device) - total_bytes) // max(1.0, per_sample))
    return min(at_most, max(0, samples + more))


def lines(cost: Cost) -> Iterator[str]:
    """Yield the lines of text for the user."""
    memory = cost.memory_bytes
    parts = [f"{name} {_size(size)}" for name, size in asdict(memory).items() if name != "total" and size]
    batch = f"{cost.batch_size_per_rank} {cost.unit}"
    passes = f" in each of {cost.micro_batches} micro-batches" if cost.micro_batches > 1 else ""
    yield f"{cost.program}, {cost.model}, {cost.precision}: one step of one rank with {batch}{passes}"
    yield f"parameters  {cost.parameters:,}"
    yield f"gradients   {_size(cost.gradient_bytes)} in {cost.gradient_tensors} tensors, as they travel between ranks"
    yield f"operators   {cost.operations:,}, {cost.kernels:,} kernels"
    yield f"arithmetic  {cost.flops / 1e12:.3g} TFLOP, of matrices and convolutions"
    yield f"traffic     {cost.bytes / 1e9:.3g} GB read from memory and written to it"
    yield f"memory      {_size(memory.total)}: {', '.join(parts)}"
    if cost.sharded_bytes:
        yield f"sharded     {_size(cost.sharded_bytes)} of the memory, divided by the number of ranks"
    yield ""
    heads = f"{'memory':>11}{'roofline':>12}{'expected':>12}{'low to high':>22}{cost.unit + '/s':>12}"
    yield f"{'':6}{heads}  {'bound by':12}largest batch"
    for device in cost.devices:
        fits = "" if device.fits else f"  {cost.batch_size_per_rank} {cost.unit} do not fit"
        band = f"{_ms(device.low_s)} to {_ms(device.high_s)}"
        yield (
            f"{device.name:6}{_size(device.memory_bytes):>11}{_ms(device.roofline_s):>12}{_ms(device.step_s):>12}"
            f"{band:>22}{device.samples_per_s:>12,.0f}  {device.bound:12}{device.largest_batch_per_rank:,}{fits}"
        )
    yield ""
    yield "expected: by the median of measured steps; all of these lie between low and high (docs: step costs)."
    yield f"not seen: {'; '.join(cost.cannot_see)}."


def _size(size: int) -> str:
    return f"{size / 2**30:.3g} GiB" if size >= 2**30 else f"{size / 2**20:.3g} MiB"


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.3g} ms"
