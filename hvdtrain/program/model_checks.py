"""Checks of a model before its first step: whether it can be trained, saved and restored."""

import io

import torch
from torch import nn

from hvdtrain.checkpoint.files import pack
from hvdtrain.core import model_state
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
        if getattr(module, "sparse", None) is True and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise BadInput(
                f"{name or 'the model'}, {type(module).__name__}: sparse=True gives sparse gradients, which are not "
                "supported. Pass sparse=False."
            )


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
                f"{name} of the model cannot be saved and restored ({type(error).__name__}: {error}). Use tensors, "
                "numbers, strings, lists and dicts, and restore them in set_extra_state."
            ) from error
