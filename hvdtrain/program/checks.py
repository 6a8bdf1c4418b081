"""Checks on which all ranks agree before the first step: the device, the batches, the model, the run folder."""

import io
import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint import changes
from hvdtrain.checkpoint.files import pack
from hvdtrain.checkpoint.run_folder import RunFolder, open_on_all, unfinished_run
from hvdtrain.core.model import state as model_state
from hvdtrain.core.model.state import first_line
from hvdtrain.insight.tracking.environment import without_secrets
from hvdtrain.loop.draft import Job
from hvdtrain.loop.feed.order import BatchSizes, batch_sizes
from hvdtrain.program.settings import Settings
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.ranks.device import choose_device, require_own_device
from hvdtrain.settings.group import methods
from hvdtrain.settings.notes import auto_fields
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.files import read_file


def select_device(comm: Comm, precision: str) -> torch.device:
    """Choose this rank's device, which no other rank uses; BadInput if it lacks the precision."""
    device = agree(comm, lambda: require_device(comm, precision))
    require_own_device(comm, device)
    return device


def require_device(comm: Comm, precision: str) -> torch.device:
    """Return this rank's device; BadInput if it lacks the precision."""
    device = choose_device(comm)
    if precision == "fp16" and device.type == "cpu":
        raise BadInput("--precision fp16 needs a GPU. Use bf16 or fp32 on CPUs.")
    if precision == "bf16" and device.type == "cuda" and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise BadInput(
            f"--precision bf16: {torch.cuda.get_device_name(device)} does not support bf16. Use fp16 or fp32."
        )
    return device


def require_batches(settings: Settings, *, train: int, test: int, ranks: int, unit: str) -> BatchSizes:
    """Divide an epoch of `train` samples over the ranks; BadInput if that is impossible or `test` is 0."""
    sizes = batch_sizes(settings, samples=train, ranks=ranks)
    share, micro_batch = train // ranks, sizes.micro_batch
    if share < 1 or test < 1:
        data = "the data" if "data" in auto_fields(type(settings)) else f"--data {settings.data}"
        raise BadInput(
            f"{data}: {train} training and {test} test {unit} are too few for {ranks} ranks. Add "
            f"{unit}, or start fewer ranks."
        )
    if micro_batch * settings.accumulate_steps > share:
        amount = f"--batch-size-per-rank {micro_batch}"
        amount += f" x --accumulate-steps {settings.accumulate_steps}" if settings.accumulate_steps > 1 else ""
        if settings.global_batch_size is not None:
            amount = f"{micro_batch * settings.accumulate_steps} of --global-batch-size {settings.global_batch_size}"
        raise BadInput(
            f"{amount} is more than a rank's share of {share} {unit} ({train} over {ranks} ranks). Lower it, or "
            "start fewer ranks."
        )
    return sizes


def require_job(settings: Settings, job: Job) -> None:
    """Raise BadInput if a feature cannot train this job."""
    for check_job in methods(settings, "check_job"):
        check_job(job)


def saved_config(settings: Settings) -> dict[str, Any]:
    """Return config.json of the run that is resumed with these settings; empty for a new run."""
    path = unfinished_run(settings)
    try:
        return {} if path is None else dict(json.loads(read_file(path / "config.json")))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}


def open_folder(settings: Settings, job: Job) -> RunFolder:
    """Open the run folder, which must be new or from a compatible training on the same number of samples."""
    os.umask(0o077)  # only the owner may read the run's files
    metadata = changes.describe_run(
        {
            **without_secrets(asdict(settings)),
            **({} if job.optimizer_name is None else {"optimizer": job.optimizer_name}),
            **({} if job.length_option == "--epochs" else {changes.OWN_STEPS: job.steps}),
        },
        np=job.comm.size,
        global_batch=job.sizes.global_batch,
        samples=len(job.train),
        unit=job.task.unit,
        content=job.train.content,
        data=job.data,
    )
    return open_on_all(job.comm, settings, metadata)


def require_parameters(model: nn.Module) -> None:
    """Raise BadInput if the model has no trainable parameters, or some that cannot be trained."""
    trainable = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    if not trainable:
        raise BadInput(
            "the model has no trainable parameters. Call requires_grad_(True) on the modules that shall train."
        )
    for name, parameter in trainable:
        if parameter.is_complex():
            raise BadInput(
                f"parameter {name} is complex. Store it as torch.view_as_real(...), and use torch.view_as_complex in "
                "forward."
            )
        if parameter.layout != torch.strided:
            raise BadInput(f"parameter {name} is sparse. Store it as a dense parameter.")
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse:
            _refuse_sparse_gradient(f"{name}.weight" if name else "weight")


def require_dense(model: nn.Module, gradients: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Raise BadInput if a gradient is sparse."""
    for name, parameter in model.named_parameters():
        gradient = gradients.get(parameter)
        if gradient is not None and gradient.layout != torch.strided:
            _refuse_sparse_gradient(name)


def _refuse_sparse_gradient(name: str) -> NoReturn:
    raise BadInput(f"parameter {name} gets sparse gradients, which are not supported. Pass sparse=False to its layer.")


def require_savable(model: nn.Module) -> None:
    """Pack the model's buffers and extra state, unpack and restore them; BadInput if that fails."""
    own = model_state.state_of(model)
    for name, value in (own.buffers | own.extra).items():
        try:
            unpacked = torch.load(io.BytesIO(pack("model", {name: value})), weights_only=True)
            restore = model_state.set_extra_state if name in own.extra else model_state.set_buffers
            restore(model, unpacked)
        except Exception as error:
            raise BadInput(
                f"{name} of the model cannot be saved and restored ({first_line(error)}). Use tensors, numbers, "
                "strings, lists and dicts, and restore them in set_extra_state."
            ) from error
