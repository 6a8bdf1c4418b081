"""Weights of a pretrained BERT, by whatever names it was saved under."""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor

from hvdtrain.ranks.agree import agreed
from hvdtrain.ranks.comm import Comm
from hvdtrain.safety.exits import BadInput
from hvdtrain.text.model import Bert, BertForClassification
from hvdtrain.text.pretrained import PICKLED_WEIGHTS, WEIGHTS, Pretrained

Model = TypeVar("Model", bound=Bert)
Weights = Mapping[str, Tensor]

_WORDS, _DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"
_MAY_BE_FRESH = ("bert.pooler.", "classifier.")  # heads that are trained with the task
_OLD_NORMS = {"gamma": "weight", "beta": "bias"}


def build_on_all(
    comm: Comm, build: Callable[[], Model], *, seed: int, pretrained: Pretrained | None, labels: Sequence[str] = ()
) -> Model:
    """The model, initialised alike on all ranks, with pretrained weights if there are any; see `load`."""

    def build_it() -> Model:
        torch.manual_seed(seed)
        model = build()
        if pretrained is not None:
            load(model, pretrained, labels)
        return model

    return agreed(comm, build_it)


def load(model: Bert, pretrained: Pretrained, labels: Sequence[str] = ()) -> None:
    """Copy the pretrained weights into the model, those of a classifier in the order of these labels.

    A pooler that is missing and a classifier of other classes stay as they were initialised. Raises BadInput for a torn
    file and for weights of another model.
    """
    state = model.state_dict()
    weights = _of_this_model(_renamed(_read(pretrained)), model, pretrained.source)
    weights = _by_label(weights, pretrained.labels, labels)
    odd = {name for name, own in state.items() if name not in weights or weights[name].shape != own.shape}
    fresh = tuple(head for head in _MAY_BE_FRESH if any(name.startswith(head) for name in odd))
    wrong = [name for name in [*odd, *(weights.keys() - state.keys())] if not name.startswith(fresh)]
    if wrong:
        raise BadInput(
            f"--pretrained {pretrained.source}: the weights are of another model ({len(wrong)} names are missing, "
            f"unknown or of another shape, as {min(wrong)})"
        )
    model.load_state_dict({**state, **{name: one for name, one in weights.items() if not name.startswith(fresh)}})


def _read(pretrained: Pretrained) -> Weights:
    path = pretrained.folder / WEIGHTS
    if not path.is_file():
        path = pretrained.folder / PICKLED_WEIGHTS
    try:
        weights = load_file(path) if path.name == WEIGHTS else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a torn file can make torch.load raise anything
        raise BadInput(f"--pretrained {pretrained.source}: {path.name} is torn, or no file of weights") from error
    if not isinstance(weights, dict) or not all(
        isinstance(name, str) and isinstance(weight, Tensor) for name, weight in weights.items()
    ):
        raise BadInput(f"--pretrained {pretrained.source}: {path.name} holds no state dict (name -> tensor)")
    return weights


def _renamed(weights: Weights) -> Weights:
    """By today's names: norms once had a gamma and a beta, and a model that was saved without a head has no prefix."""
    today = {
        re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda old: _OLD_NORMS[old[0]], name): weight
        for name, weight in weights.items()
    }
    if any(name.startswith("bert.") for name in today):
        return today
    return {f"bert.{name}": weight for name, weight in today.items()}


def _of_this_model(weights: Weights, model: Bert, source: str) -> Weights:
    """Without other heads, and without a decoder that is the word embeddings once more."""
    others = ["bert.embeddings.position_ids", "cls.seq_relationship.", f"{_DECODER}."]
    if isinstance(model, BertForClassification):
        others.append("cls.")
    else:
        others += _MAY_BE_FRESH
        decoder, words = weights.get(f"{_DECODER}.weight"), weights.get(_WORDS)
        if decoder is not None and words is not None and not torch.equal(decoder, words):
            raise BadInput(
                f"--pretrained {source}: {_DECODER}.weight differs from the word embeddings, by which alone this BERT "
                "predicts; give another model"
            )
    kept = {name: weight for name, weight in weights.items() if not name.startswith(tuple(others))}
    bias = weights.get(f"{_DECODER}.bias")
    if bias is not None and not isinstance(model, BertForClassification):
        kept.setdefault("cls.predictions.bias", bias)
    return kept


def _by_label(weights: Weights, theirs: Sequence[str], ours: Sequence[str]) -> Weights:
    """With a classifier's rows in our order; without one where it has names for its labels, and others."""
    if not theirs or not ours:
        return weights
    head = {name: weight for name, weight in weights.items() if name.startswith("classifier.")}
    rest = {name: weight for name, weight in weights.items() if name not in head}
    if sorted(theirs) != sorted(ours) or any(len(weight) != len(theirs) for weight in head.values()):
        return rest
    rows = [theirs.index(label) for label in ours]
    return rest | {name: weight[rows] for name, weight in head.items()}
