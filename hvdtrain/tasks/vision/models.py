"""EfficientNets by name: torchvision's, and a tiny one made of torchvision's blocks."""

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from http.client import HTTPException
from pathlib import Path
from zipfile import is_zipfile

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models import EfficientNet
from torchvision.models.efficientnet import MBConvConfig
from torchvision.ops.misc import Conv2dNormActivation

from hvdtrain.core.blocks import Block, Blocks, Inputs
from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.unpickled import refuse_weights
from hvdtrain.tasks.vision import layers
from hvdtrain.tasks.vision.preprocessing import Preprocessing
from hvdtrain.tasks.vision.settings import TINY


def build(
    name: str,
    *,
    classes: int,
    pretrained: str | None = None,
    stem_stride: int | None = None,
    dropout: float | None = None,
    stochastic_depth: float | None = None,
) -> EfficientNet:
    """Build an EfficientNet for (N, 3, H, W) images with `classes` logits, with pretrained weights if requested.

    `stem_stride` 1 keeps the resolution of small images. `dropout` is a probability, `stochastic_depth` that of the
    last block. None keeps the model's default.
    """
    given = {"dropout": dropout, "stochastic_depth_prob": stochastic_depth}
    options = {option: value for option, value in given.items() if value is not None}
    make = _build_tiny if name == TINY else partial(torchvision.models.get_model, name, weights=None)
    model: EfficientNet = make(num_classes=classes, **options)
    if stem_stride is not None:
        model.features[0][0].stride = (stem_stride, stem_stride)
    for module in model.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = False  # in place, autograd would copy its input in training, which the backward pass needs
    layers.convert(model)
    if pretrained is not None:
        load_weights(model, pretrained_weights(name, pretrained), pretrained)
    return model


def fetch_on_all(comm: Comm, name: str, pretrained: str | None) -> None:
    """Download the weights once per host if they are the hub's."""
    if pretrained == "hub":
        agree(comm, lambda: pretrained_weights(name, "hub") if comm.local_rank == 0 else None)


def preprocessing(name: str) -> Preprocessing:
    """Return the preprocessing with which the model's best weights in torchvision were evaluated."""
    if name == TINY:  # has none; an image of its native size is not changed
        return replace(preprocessing("efficientnet_b0"), resize=32, crop=32)
    weights = torchvision.models.get_model_weights(name).DEFAULT.transforms()
    return Preprocessing(
        resize=weights.resize_size[0],
        crop=weights.crop_size[0],
        interpolation=weights.interpolation,
        mean=tuple(weights.mean),
        std=tuple(weights.std),
    )


def pretrained_weights(name: str, source: str) -> dict[str, Tensor]:
    """Load a state dict for model `name` from a file, or from torchvision's hub if `source` is 'hub'.

    Raises BadInput if the file is missing or not a state dict, or if the hub cannot be reached.
    """
    if source == "hub":
        if name == TINY:
            raise BadInput(f"--pretrained hub: torchvision has no weights for {TINY}. Pass a file, or another --model.")
        weights = torchvision.models.get_model_weights(name).DEFAULT
        try:
            with socket_timeout():
                return dict(weights.get_state_dict(progress=False, check_hash=True, weights_only=True))
        except (OSError, RuntimeError, HTTPException) as error:
            raise BadInput(
                f"--pretrained hub: cannot download {weights.url} ({error}). Download it elsewhere and pass the file."
            ) from error
    if not Path(source).is_file():
        raise BadInput(f"--pretrained {source}: no such file. Pass one, or 'hub' for torchvision's weights.")
    refuse_weights(source, "Pass 'hub' for torchvision's weights")
    try:
        # Memory-mapped: a stage reads only its part.
        state = torch.load(source, map_location="cpu", weights_only=True, mmap=is_zipfile(source))
    except Exception as error:  # a damaged archive can make torch.load raise anything
        raise BadInput(
            f"--pretrained {source}: not a file of tensors that torch.save wrote. Pass another file."
        ) from error
    if not isinstance(state, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in state.items()
    ):
        raise BadInput(f"--pretrained {source}: not a state dict (name -> tensor). Pass another file.")
    return state


def load_weights(model: EfficientNet, state: dict[str, Tensor], source: str) -> None:
    """Copy a state dict into the model; a head for another number of classes keeps its initial values."""
    head = {f"classifier.1.{name}": value for name, value in model.classifier[1].state_dict().items()}
    other_classes = any(name in state and state[name].shape != value.shape for name, value in head.items())
    weights_to_load = {name: value for name, value in state.items() if not (other_classes and name in head)}
    try:
        missing, unexpected = model.load_state_dict(weights_to_load, strict=False)
    except RuntimeError as error:
        reason = " ".join(str(error).split())[:300]
        raise BadInput(
            f"--pretrained {source}: weights of another model ({reason}). Pass this model's weights."
        ) from error
    mismatched = [name for name in missing if name not in head] + unexpected
    if mismatched:
        raise BadInput(
            f"--pretrained {source}: weights of another model ({len(mismatched)} names, such as {mismatched[0]}). "
            "Pass this model's weights."
        )


def _build_tiny(**options: float) -> EfficientNet:
    """Build a smaller and narrower b0 (MBConv, squeeze-excitation, SiLU): 74 thousand parameters for 10 classes."""
    blocks = [  # expansion, kernel, stride, in, out, repeats
        MBConvConfig(1, 3, 1, 16, 16, 1),
        MBConvConfig(4, 3, 2, 16, 24, 1),
        MBConvConfig(4, 3, 2, 24, 40, 2),
        MBConvConfig(4, 3, 2, 40, 64, 1),
    ]
    return EfficientNet(blocks, last_channel=256, **{"dropout": 0.1, "stochastic_depth_prob": 0.0, **options})


def blocks(model: EfficientNet) -> Blocks:
    """Return the blocks: the stem, each MBConv, the last convolution, and the classifier with the pooling before it."""
    names = []
    for number, feature in enumerate(model.features):
        is_conv = isinstance(feature, Conv2dNormActivation)
        names += [f"features.{number}"] if is_conv else [f"features.{number}.{index}" for index in range(len(feature))]
    return Blocks(
        row=(
            *(Block(name=name, modules=(name,), run=partial(_run_feature, name)) for name in names),
            Block(name="classifier", modules=("avgpool", "classifier"), run=_run_classifier),
        ),
        batch_dims=1,
    )


def _run_feature(name: str, model: nn.Module, hidden: Tensor | None, inputs: Inputs) -> Tensor:
    output: Tensor = model.get_submodule(name)(inputs[0] if hidden is None else hidden)
    return output


def _run_classifier(model: nn.Module, hidden: Tensor | None, _: Inputs) -> Tensor:
    assert isinstance(model, EfficientNet)
    assert hidden is not None
    logits: Tensor = model.classifier(torch.flatten(model.avgpool(hidden), 1))
    return logits


@contextmanager
def socket_timeout() -> Iterator[None]:
    """Within this context, a connection that is silent for 15 seconds raises OSError."""
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(15.0)
    try:
        yield
    finally:
        socket.setdefaulttimeout(timeout_s)
