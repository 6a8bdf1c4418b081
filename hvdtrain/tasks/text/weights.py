"""Weights of a pretrained BERT, under any of the names in use."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import is_zipfile

import torch
from safetensors.torch import load_file
from torch import Tensor

from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.unpickled import refuse_weights
from hvdtrain.tasks.text.model import Bert, BertForClassification
from hvdtrain.tasks.text.pretrained import WEIGHTS, Pretrained, find_weights

Weights = Mapping[str, Tensor]

_BERT = "bert."
_WORD_EMBEDDINGS, _DECODER = "bert.embeddings.word_embeddings.weight", "cls.predictions.decoder"
_OPTIONAL_HEADS = ("bert.pooler.", "classifier.")  # heads that are trained with the task
_OLD_NORMS = {"gamma": "weight", "beta": "bias"}


def load_pretrained(model: Bert, pretrained: Pretrained, labels: Sequence[str] = ()) -> None:
    """Copy the pretrained weights into the model, a classifier's in the order of these labels.

    A missing pooler and a classifier of other classes keep their initial values. Raises BadInput for a truncated file
    and for weights of another model.
    """
    state = model.state_dict()
    weights = _select_weights(_rename(_read_weights(pretrained)), model, pretrained.source)
    weights = _order_classifier(weights, pretrained.labels, labels)
    mismatched = {name for name, weight in state.items() if name not in weights or weights[name].shape != weight.shape}
    fresh_heads = tuple(head for head in _OPTIONAL_HEADS if any(name.startswith(head) for name in mismatched))
    unusable = [name for name in [*mismatched, *(weights.keys() - state.keys())] if not name.startswith(fresh_heads)]
    if unusable:
        raise BadInput(
            f"--pretrained {pretrained.source}: weights of another model ({len(unusable)} names are missing, unknown "
            f"or of another shape, such as {min(unusable)}). Pass this model's weights."
        )
    model.load_state_dict(
        {**state, **{name: weight for name, weight in weights.items() if not name.startswith(fresh_heads)}}
    )


def _read_weights(pretrained: Pretrained) -> Weights:
    weights: dict[str, Tensor] = {}
    for path in find_weights(pretrained.folder, pretrained.source):
        weights |= _read_file(path, pretrained.source)
    return weights


def _read_file(path: Path, source: str) -> Weights:
    subject = f"--pretrained {source}: {path.name}"
    is_pickled = path.suffix != Path(WEIGHTS).suffix
    if is_pickled:
        refuse_weights(source, f"Pass a model that has {WEIGHTS}")
    try:
        if is_pickled:
            weights = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zipfile(path))
        else:
            weights = load_file(path)
    except Exception as error:  # a truncated file can make torch.load raise anything
        raise BadInput(f"{subject} is truncated, or not a file of weights. Download it again.") from error
    items = weights.items() if isinstance(weights, dict) else [(None, None)]
    if not all(isinstance(name, str) and isinstance(weight, Tensor) for name, weight in items):
        raise BadInput(f"{subject} does not hold a state dict (name -> tensor). Pass another folder.")
    return dict(weights)


def _rename(weights: Weights) -> Weights:
    """Convert names: norms had a gamma and a beta, and what is around the BERT, or nothing, is before its names."""
    renamed = {
        re.sub(r"(?<=LayerNorm\.)(gamma|beta)$", lambda old: _OLD_NORMS[old[0]], name): weight
        for name, weight in weights.items()
    }
    inside = _WORD_EMBEDDINGS.removeprefix(_BERT)
    prefix = next((name.removesuffix(inside) for name in renamed if name.endswith(inside)), _BERT)
    outside = prefix.removesuffix(_BERT)
    return {
        _BERT + name.removeprefix(prefix) if name.startswith(prefix) else name.removeprefix(outside): weight
        for name, weight in renamed.items()
    }


def _select_weights(weights: Weights, model: Bert, source: str) -> Weights:
    """Drop other heads, and a decoder that duplicates the word embeddings."""
    dropped = ["bert.embeddings.position_ids", "cls.seq_relationship.", "qa_outputs.", f"{_DECODER}."]
    if isinstance(model, BertForClassification):
        dropped.append("cls.")
    else:
        dropped += _OPTIONAL_HEADS
        decoder, words = weights.get(f"{_DECODER}.weight"), weights.get(_WORD_EMBEDDINGS)
        if decoder is not None and words is not None and not torch.equal(decoder, words):
            raise BadInput(
                f"--pretrained {source}: {_DECODER}.weight differs from the word embeddings, the only decoder that "
                "is supported. Pass another model."
            )
    kept = {name: weight for name, weight in weights.items() if not name.startswith(tuple(dropped))}
    bias = weights.get(f"{_DECODER}.bias")
    if bias is not None and not isinstance(model, BertForClassification):
        kept.setdefault("cls.predictions.bias", bias)
    return kept


def _order_classifier(weights: Weights, saved_labels: Sequence[str], labels: Sequence[str]) -> Weights:
    """Reorder a classifier's rows to our labels; drop the classifier if it has other names for its labels."""
    if not saved_labels or not labels:
        return weights
    head = {name: weight for name, weight in weights.items() if name.startswith("classifier.")}
    body = {name: weight for name, weight in weights.items() if name not in head}
    if sorted(saved_labels) != sorted(labels) or any(len(weight) != len(saved_labels) for weight in head.values()):
        return body
    rows = [saved_labels.index(label) for label in labels]
    return body | {name: weight[rows] for name, weight in head.items()}
