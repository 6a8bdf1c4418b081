"""A dry run: counts one training step on a GPU that need not exist."""

import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from copy import copy
from pathlib import Path
from typing import NoReturn, TypeVar

import torch
from torch import nn

from hvdtrain.core.phases import READS_HERE
from hvdtrain.core.task import Batch, Task
from hvdtrain.insight.costs import report
from hvdtrain.insight.costs.absent_gpu import GPU, AbsentGpu, absent_gpu, size_bytes
from hvdtrain.insight.costs.counts import Operation
from hvdtrain.insight.costs.devices import DEVICES, Device
from hvdtrain.insight.costs.report import Cost, StepMemory
from hvdtrain.insight.costs.roofline import roofline
from hvdtrain.loop.draft import Job
from hvdtrain.loop.feed.feed import Split, raw_batches
from hvdtrain.program import assembly
from hvdtrain.program.checks import require_job
from hvdtrain.program.run import Run
from hvdtrain.program.settings import Settings
from hvdtrain.program.task_trial import place_in_program
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput, print_answer

S = TypeVar("S", bound=Settings)
Model = nn.Module | Callable[[], nn.Module]


class StepCounted(BaseException):
    """Raised when the step of a program's training was counted, to leave its `main`."""

    def __init__(self, cost: Cost) -> None:
        super().__init__()
        self.cost = cost


def count_step(main: Callable[[Run[S]], object], comm: Comm, settings: S) -> Cost:
    """Return the cost of a step of the training that `main` builds; BadInput if it builds none."""
    with ExitStack() as stack:
        try:
            main(DryRun(comm, settings, stack))
        except StepCounted as counted:
            return counted.cost
    raise BadInput("--dry-run: the program has ended without a training. Call run.training(...).")


class DryRun(Run[S]):
    """A run on an absent GPU, which counts a step of its training and ends."""

    def _select_device(self) -> torch.device:
        self._absent = self._stack.enter_context(absent_gpu())
        return GPU

    def _source(self, model: Model) -> Model:
        self._model = model
        return on_meta(model)

    def _begin(self, job: Job, test: Split, about: object, at_end: object) -> NoReturn:
        of_host = copy(job.train)
        try:
            cost = measure(self.settings, job, self._absent)
        except Exception as error:
            refuse_if_it_trains(error, job.task, of_host, self._model)
            raise
        raise StepCounted(cost)


def on_meta(model: Model) -> Model:
    """Return the model, or its constructor on meta; with values if the constructor reads values."""
    if isinstance(model, nn.Module):
        return model

    def made() -> nn.Module:
        with suppress(Exception), torch.device("meta"), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "for .*: copying from a non-meta parameter")  # pretrained weights
            return model()
        return model()

    return made


class CountedStep:
    """The step of a job, for batches of any size."""

    def __init__(self, settings: Settings, job: Job, gpu: AbsentGpu) -> None:
        """Prepare the step; the job's model is on meta or on the host, and `gpu` is active in this process."""
        self._settings, self._job, self._gpu = settings, job, gpu
        require_job(settings, job)
        self.parameters = sum(parameter.numel() for parameter in job.model.parameters())
        where = assembly.arrange(settings, job)
        job.model.to(memory_format=job.task.memory_format)
        gpu.adopt(job.model)
        self._step = assembly.build_step(settings, job, where, lr=1.0)

    def count(self, samples: int) -> tuple[list[Operation], StepMemory, int]:
        """Count a step with `samples` samples per micro-batch; return also its memory, and that after a forward pass.

        The first step allocates the optimizer's state at its end. The memory reported is that of later steps, which
        includes this state; the allocating operators are not counted.
        """
        gpu, step, passes, before_bytes = self._gpu, self._step, self._settings.accumulate_steps, self._state_bytes()
        gpu.operations = operations = list[Operation]()
        gpu.memory.restart()
        step(self._batches(samples, passes), backward_passes=passes, global_count=float(samples * passes), lr=1.0)
        step.optimizer.zero_grad(set_to_none=True)
        gpu.operations = []  # what follows is not of the step
        made_bytes = self._state_bytes() - before_bytes
        peak_bytes = gpu.memory.peak_bytes + made_bytes
        parameters = list(step.model.parameters())
        parts = {
            "parameters": size_bytes(parameters),
            "gradients": size_bytes(one for one in parameters if one.requires_grad),
            "optimizer": self._state_bytes(),
            "average": 0 if step.average is None else size_bytes(step.average.model().parameters()),
        }
        memory = StepMemory(**parts, activations=peak_bytes - sum(parts.values()), total=peak_bytes)
        return operations, memory, gpu.memory.forward_bytes + made_bytes

    def _state_bytes(self) -> int:
        states = [value for state in self._step.optimizer.state.values() for value in state.values()]
        return size_bytes(one for one in states if isinstance(one, torch.Tensor) and one.dim())

    def _batches(self, samples: int, passes: int) -> Iterator[Batch]:
        job = self._job
        wanted = torch.arange(min(samples, len(job.train)))
        for placed, raw in raw_batches(job.train, [wanted] * passes, job.device, 0, phases=READS_HERE):
            yield job.task.prepare(raw, placed, 0)


def measure(settings: Settings, job: Job, gpu: AbsentGpu) -> Cost:
    """Return the cost of a step of the job on the devices that the settings name."""
    run, samples, passes = CountedStep(settings, job, gpu), job.sizes.micro_batch, settings.accumulate_steps
    other = samples // 2 or 2
    _, before, before_forward = run.count(other)
    operations, memory, after_forward = run.count(samples)
    # With a small batch the peak may be in the optimizer, which does not grow; the memory saved by forward passes does.
    grown_bytes = [memory.total - before.total, after_forward - before_forward]
    assumed = getattr(job.train, "assumed", None)  # of data that do not exist here
    devices = [
        report.cost_on(
            device,
            roofline(operations, device, settings.precision),
            samples=samples * passes,
            batch=samples,
            total_bytes=memory.total,
            per_sample=max(size / (samples - other) for size in grown_bytes),
            at_most=sys.maxsize if assumed else len(job.train),
        )
        for device in devices_of(settings)
    ]
    return Cost(
        program=program_name(),
        model=settings.model,
        unit=job.task.unit,
        precision=settings.precision,
        batch_size_per_rank=samples,
        micro_batches=passes,
        parameters=run.parameters,
        gradient_tensors=sum(parameter.requires_grad for parameter in job.model.parameters()),
        gradient_bytes=assembly.gradient_bytes(settings, job),
        operations=len(operations),
        kernels=sum(one.kernels for one in operations),
        flops=sum(one.flops for one in operations),
        bytes=sum(one.bytes for one in operations),
        memory_bytes=memory,
        sharded_bytes=memory.optimizer + memory.average if settings.shard_optimizer else 0,
        devices=tuple(devices),
        cannot_see=(*([f"other data than {assumed}"] if assumed else []), *report.CANNOT_SEE),
    )


def refuse_if_it_trains(error: Exception, task: Task, train: Split, model: Model) -> None:
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
    """Return the devices that the settings name, or all devices with their precision."""
    named = [DEVICES[name] for name in settings.dry_run_words if name in DEVICES]
    return named or [device for device in DEVICES.values() if device.has_bf16 or settings.precision != "bf16"]


def program_name() -> str:
    """Return the module name of the running program, or its file name."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return Path(sys.argv[0]).stem if spec is None else spec.name.removesuffix(".__main__")


def print_cost(cost: Cost, *, as_json: bool) -> None:
    """Print the cost as JSON for other programs, or as text for the user."""
    print_answer(cost.to_json() if as_json else "\n".join(report.lines(cost)))
