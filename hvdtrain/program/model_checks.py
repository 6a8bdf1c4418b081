"""Checks of a model before its first step: whether it can be trained, saved and restored."""

import io
from collections.abc import Mapping
from typing import NoReturn

import torch
from torch import Tensor, nn

from hvdtrain.checkpoint.files import pack
from hvdtrain.model import state as model_state
from hvdtrain.model.state import first_line
from hvdtrain.safety.exits import BadInput


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
    extra = model_state.extra_state(model)
    for name, value in (model_state.buffers(model) | extra).items():
        try:
            unpacked = torch.load(io.BytesIO(pack("model", {name: value})), weights_only=True)
            restore = model_state.set_extra_state if name in extra else model_state.set_buffers
            restore(model, unpacked)
        except Exception as error:
            raise BadInput(
                f"{name} of the model cannot be saved and restored ({first_line(error)}). Use tensors, numbers, "
                "strings, lists and dicts, and restore them in set_extra_state."
            ) from error
