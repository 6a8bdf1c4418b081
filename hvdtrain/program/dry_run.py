"""A dry run: counts one training step on a GPU that need not exist."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import nn

from hvdtrain.core.phases import READS_HERE
from hvdtrain.core.task import Batch, Task
from hvdtrain.costs import report
from hvdtrain.costs.absent_gpu import AbsentGpu
from hvdtrain.costs.counts import Counts
from hvdtrain.costs.devices import DEVICES, Device
from hvdtrain.costs.memory import size_bytes
from hvdtrain.costs.report import Cost, DeviceCost, StepMemory
from hvdtrain.costs.roofline import roofline
from hvdtrain.feed.feed import Split, arriving
from hvdtrain.loop.draft import Job
from hvdtrain.program import assembly
from hvdtrain.program.checks import require_job
from hvdtrain.program.settings import Settings
from hvdtrain.program.start import Run
from hvdtrain.program.task_trial import place_in_program
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput, print_answer

S = TypeVar("S", bound=Settings)


class Counted(BaseException):
    """Raised when the step of a program's training was counted, to leave its `main`."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost


def count_step(main: Callable[[Run[S]], object], comm: Comm, settings: S) -> Cost:
    """Return the cost of a step of the training that `main` builds; BadInput if it builds none."""
    with ExitStack() as stack:
        try:
            main(Run(comm, settings, stack))
        except Counted as counted:
            return counted.cost
    raise BadInput("--dry-run: the program has ended without a training. Call run.training(...).")


def on_meta(model: nn.Module | Callable[[], nn.Module]) -> nn.Module | Callable[[], nn.Module]:
    """Return the model, or its constructor on meta; with values if the constructor reads values."""
    if isinstance(model, nn.Module):
        return model

    def made() -> nn.Module:
        try:
            with torch.device("meta"), warnings.catch_warnings():
                warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # pretrained weights
                return model()
        except Exception as error:
            if isinstance(error, BadInput):
                raise
        return model()

    return made


@dataclass(frozen=True, kw_only=True)
class DryStep:
    """A counted step."""

    counts: Counts
    memory: StepMemory
    forward_bytes: int  # after a forward pass


class DryRun:
    """The step of a job, for batches of any size."""

    def __init__(self, settings: Settings, job: Job, gpu: AbsentGpu) -> None:
        """Prepare the step; the job's model is on meta or on the host, and `gpu` is active in this process."""
        self._settings, self._job, self._gpu = settings, job, gpu
        require_job(settings, job)
        self.parameters = sum(parameter.numel() for parameter in job.model.parameters())
        where = assembly.arrange(settings, job)
        job.model.to(memory_format=job.task.memory_format)  # type: ignore[call-overload]
        gpu.adopt(job.model)
        self.step = assembly.build_step(settings, job, where, lr=1.0)
        self.gradient_bytes = settings.compression_on(job.device.type).sent_bytes(job.model)

    def count(self, samples: int) -> DryStep:
        """Count a step with `samples` samples per micro-batch.

        The first step allocates the optimizer's state at its end. The memory reported is that of later steps, which
        includes this state; the allocating operators are not counted.
        """
        gpu, state_bytes = self._gpu, self._state_bytes()
        gpu.counts = counts = Counts()
        gpu.memory.restart()
        self._take(samples)
        gpu.counts = Counts()
        made_bytes = self._state_bytes() - state_bytes
        memory = self._memory(gpu.memory.peak_bytes + made_bytes)
        return DryStep(counts=counts, memory=memory, forward_bytes=gpu.memory.forward_bytes + made_bytes)

    def _state_bytes(self) -> int:
        states = [value for state in self.step.optimizer.state.values() for value in state.values()]
        return size_bytes([one for one in states if isinstance(one, torch.Tensor) and one.dim()])

    def _take(self, samples: int) -> None:
        passes = self._settings.accumulate_steps
        batches = self._batches(samples, passes)
        self.step(batches, backward_passes=passes, global_count=float(samples * passes), lr=1.0)
        self.step.optimizer.zero_grad(set_to_none=True)

    def _batches(self, samples: int, passes: int) -> Iterator[Batch]:
        job = self._job
        wanted = torch.arange(min(samples, len(job.train)))
        for placed, raw in arriving(job.train, [wanted] * passes, job.device, 0, phases=READS_HERE):
            yield job.task.prepare(raw, placed, 0)

    def _memory(self, peak_bytes: int) -> StepMemory:
        step = self.step
        parameters = list(step.model.parameters())
        parts = {
            "parameters": size_bytes(parameters),
            "gradients": size_bytes([one for one in parameters if one.requires_grad]),
            "optimizer": self._state_bytes(),
            "average": 0 if step.average is None else size_bytes(list(step.average.model().parameters())),
        }
        return StepMemory(**parts, activations=peak_bytes - sum(parts.values()), total=peak_bytes)


def measure(settings: Settings, job: Job, gpu: AbsentGpu) -> Cost:
    """Return the cost of a step of the job on the devices that the settings name."""
    run, samples = DryRun(settings, job, gpu), job.sizes.micro_batch
    other = samples // 2 or 2
    before, taken = run.count(other), run.count(samples)
    # With a small batch the peak may be in the optimizer, which does not grow; the memory saved by forward passes does.
    grown = (taken.memory.total - before.memory.total, taken.forward_bytes - before.forward_bytes)
    per_sample = max(one / (samples - other) for one in grown)
    precision = "tf32" if settings.precision == "fp32" and settings.tf32 else settings.precision
    counts, passes = taken.counts, settings.accumulate_steps

    def on(device: Device) -> DeviceCost:
        return report.on_device(
            device,
            roofline(counts.operations, device, precision),
            samples=samples * passes,
            total_bytes=taken.memory.total,
            largest_batch=report.largest_batch(
                device,
                samples,
                taken.memory.total,
                per_sample=per_sample,
                at_most=sys.maxsize if assumed else len(job.train),
            ),
        )

    assumed = getattr(job.train, "assumed", None)  # of data that do not exist here
    return Cost(
        program=program_name(),
        model=settings.model,
        unit=job.task.unit,
        precision=precision,
        batch_size_per_rank=samples,
        micro_batches=passes,
        parameters=run.parameters,
        gradient_tensors=sum(parameter.requires_grad for parameter in job.model.parameters()),
        gradient_bytes=run.gradient_bytes,
        operations=len(counts.operations),
        kernels=counts.kernels,
        flops=counts.flops,
        bytes=counts.bytes,
        memory_bytes=taken.memory,
        devices=tuple(map(on, devices_of(settings))),
        cannot_see=(*([f"other data than {assumed}"] if assumed else []), *report.CANNOT_SEE),
    )


def refuse_if_it_trains(error: Exception, task: Task, train: Split, model: nn.Module | Callable[[], nn.Module]) -> None:
    """Raise BadInput about a step that cannot be counted if two samples pass it on the host, else do nothing.

    `train` has the values of the samples: counting moves them to the absent GPU.
    """
    if isinstance(error, BadInput):
        return
    try:
        own = model if isinstance(model, nn.Module) else model()
        wanted = torch.arange(min(2, len(train)))
        [batch] = train.batches([wanted], torch.device("cpu"), None)
        task.loss(own.train(), task.prepare(batch, wanted, 0), training=True).loss.backward()
    except Exception:  # noqa: BLE001 (the first error is that of the model)
        return
    reason = (str(error).strip().partition("\n")[0] or type(error).__name__).partition(". ")[0].rstrip(".")
    place = place_in_program(error) or "the step"
    raise BadInput(
        f"--dry-run: {place} cannot be counted, since that needs values or leaves torch ({reason}). "
        "Train without --dry-run: a step of two samples on this host works."
    ) from error


def devices_of(settings: Settings) -> list[Device]:
    """Return the device that the settings name, or all devices with their precision."""
    if settings.device is not None:
        return [DEVICES[settings.device]]
    return [device for device in DEVICES.values() if device.has_bf16 or settings.precision != "bf16"]


def program_name() -> str:
    """Return the module name of the running program, or its file name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")


def print_cost(cost: Cost, *, as_json: bool) -> None:
    """Print the cost as JSON for other programs, or as text for the user."""
    print_answer(cost.to_json() if as_json else "\n".join(report.lines(cost)))
