"""BERT (Devlin et al. 2019), with the names and shapes of Hugging Face's state dicts.

N sequences of a batch, L tokens of the longest, M masked, W width, A heads, V tokens of the vocabulary, K classes.
"""

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hvdtrain.core.blocks import Block, Blocks, Inputs
from hvdtrain.parallel.tensor.linear import ColumnParallelLinear, RowParallelLinear, per_rank_draws, send_to_slices
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.tasks.text.settings import MODELS

NORM_EPS = 1e-12
CHANCES = 2**16  # in which dropout counts its probability on CPUs: a quarter of a random number of 64 bits
_WORDS = "bert.embeddings.word_embeddings"


@dataclass(frozen=True, kw_only=True)
class BertSizes:
    """The sizes of a BERT, with its initialisation and regularisation."""

    vocabulary: int  # tokens
    width: int
    layers: int
    heads: int
    intermediate: int  # width inside a feed-forward layer
    positions: int = 512  # tokens of the longest sequence
    types: int = 2  # segments of a sequence
    dropout: float = 0.1  # probability
    attention_dropout: float | None = None  # that of attention; None: the same
    classifier_dropout: float | None = None  # that before a classifier; None: the same
    initializer_range: float = 0.02  # standard deviation of initial weights


def sizes_of(name: str, *, vocabulary: int, positions: int = 512) -> BertSizes:
    """Return the sizes of a model by its name."""
    layers, width, heads, initializer_range = MODELS[name]
    return BertSizes(
        vocabulary=vocabulary,
        width=width,
        layers=layers,
        heads=heads,
        intermediate=4 * width,
        positions=positions,
        initializer_range=initializer_range,
    )


class Dropout(nn.Dropout):
    """nn.Dropout, in float32 on CPUs with a quarter of its random numbers."""

    def forward(self, values: Tensor) -> Tensor:
        """Drop values; the others grow, so that the expected value stays."""
        return dropout(values, self.p) if self.training else values


def dropout(values: Tensor, probability: float) -> Tensor:
    """Return F.dropout of values of any shape."""
    dropped = round(probability * CHANCES)
    if not _is_by_hand(values) or not 0 < dropped < CHANCES:
        return F.dropout(values, probability)
    numbers = torch.empty(math.ceil(values.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    chances = numbers.view(torch.int16)[: values.numel()].float()  # from -CHANCES / 2
    kept = chances.ge_(dropped - CHANCES // 2)  # 1 or 0
    return values * kept.mul_(CHANCES / (CHANCES - dropped)).view(values.shape)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, probability: float) -> Tensor:
    """Return scaled dot-product attention (N, A, L, W/A); `bias` is added to the scores, and weights are dropped."""
    if not probability or not _is_by_hand(query):
        attended: Tensor = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=probability)
        return attended
    scores = (query / math.sqrt(query.shape[-1])) @ key.transpose(-2, -1)  # N A L L
    weights = (scores if bias is None else scores + bias).softmax(-1)
    return dropout(weights, probability) @ value


def _is_by_hand(values: Tensor) -> bool:
    return values.device.type == "cpu" and values.dtype == torch.float32 and not torch.compiler.is_compiling()


class _Embeddings(nn.Module):
    """The sum of the embeddings of a token, its segment and its position."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(sizes.vocabulary, sizes.width)
        self.position_embeddings = nn.Embedding(sizes.positions, sizes.width)
        self.token_type_embeddings = nn.Embedding(sizes.types, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=NORM_EPS)
        self.dropout = Dropout(sizes.dropout)

    def forward(self, tokens: Tensor, types: Tensor) -> Tensor:
        positions = self.position_embeddings.weight[: tokens.shape[1]]  # L W
        embedded = self.word_embeddings(tokens) + self.token_type_embeddings(types) + positions
        normed: Tensor = self.dropout(self.LayerNorm(embedded))  # N L W
        return normed


class _CastForThree(torch.autograd.Function):
    """Casts values to autocast's type once for three layers, instead of once for each, forward and backward.

    The gradients are summed in the values' own type, as they would be after three casts, but in another order.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = values.dtype
        cast = values.to(dtype)
        return cast, cast.view_as(cast), cast.view_as(cast)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        first, second, third = gradients
        return first.to(ctx.dtype).add_(second).add_(third), None


def _for_three(values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the values for three layers, in the type of their computation."""
    kind = values.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else values.dtype
    if values.dtype == dtype:
        return values, values, values
    cast: tuple[Tensor, Tensor, Tensor] = _CastForThree.apply(values, dtype)
    return cast


class _SelfAttention(nn.Module):
    """Attention of every token to all real tokens of its sequence."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.query = nn.Linear(sizes.width, sizes.width)
        self.key = nn.Linear(sizes.width, sizes.width)
        self.value = nn.Linear(sizes.width, sizes.width)
        # entered when random numbers are drawn for each head
        self.per_rank_draws: Callable[[], AbstractContextManager[None]] = nullcontext
        self._head_width = sizes.width // sizes.heads
        self._dropout = sizes.dropout if sizes.attention_dropout is None else sizes.attention_dropout

    def forward(self, hidden: Tensor, bias: Tensor | None) -> Tensor:
        query, key, value = (
            layer(values).unflatten(-1, (-1, self._head_width)).transpose(1, 2)  # N A L W/A
            for layer, values in zip((self.query, self.key, self.value), _for_three(hidden), strict=True)
        )
        dropout = self._dropout if self.training else 0.0
        with self.per_rank_draws() if dropout else nullcontext():
            attended = _attend(query, key, value, bias, dropout)
        return attended.transpose(1, 2).flatten(2)  # N L W


class _ResidualNorm(nn.Module):
    """A linear layer with a residual connection, followed by a norm."""

    def __init__(self, inputs: int, sizes: BertSizes) -> None:
        super().__init__()
        self.dense = nn.Linear(inputs, sizes.width)
        self.LayerNorm = nn.LayerNorm(sizes.width, eps=NORM_EPS)
        self.dropout = Dropout(sizes.dropout)

    def forward(self, inputs: Tensor, residual: Tensor) -> Tensor:
        normed: Tensor = self.LayerNorm(self.dropout(self.dense(inputs)) + residual)
        return normed


class _Layer(nn.Module):
    """Attention, then two linear layers for each token."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.attention = nn.ModuleDict({"self": _SelfAttention(sizes), "output": _ResidualNorm(sizes.width, sizes)})
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(sizes.width, sizes.intermediate)})
        self.output = _ResidualNorm(sizes.intermediate, sizes)

    def forward(self, hidden: Tensor, bias: Tensor | None, places: Tensor | None = None) -> Tensor:
        """Return (N, L, W), or (M, W) only at these positions (M,); `bias` comes from `_bias`."""
        attended = self.attention["self"](hidden, bias)
        if places is not None:
            attended, hidden = (tensor.flatten(0, 1).index_select(0, places) for tensor in (attended, hidden))
        attended = self.attention["output"](attended, hidden)
        output: Tensor = self.output(F.gelu(self.intermediate["dense"](attended)), attended)
        return output


class _Bert(nn.Module):
    """The layers below all heads; with a pooler for a head that uses whole sequences."""

    def __init__(self, sizes: BertSizes, *, pooled: bool) -> None:
        super().__init__()
        self.embeddings = _Embeddings(sizes)
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(_Layer(sizes) for _ in range(sizes.layers))})
        if pooled:
            self.pooler = nn.ModuleDict({"dense": nn.Linear(sizes.width, sizes.width)})

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """Return hidden states (M, W) at the positions (M,); the last layer computes little at the others."""
        hidden: Tensor = self.embeddings(tokens, types)
        bias = _bias(mask, hidden)
        *layers, last = self.encoder["layer"].children()
        for layer in layers:
            hidden = layer(hidden, bias)
        chosen: Tensor = last(hidden, bias, places)  # M W
        return chosen


def _bias(mask: Tensor, hidden: Tensor) -> Tensor | None:
    """Return the bias of attention scores, (N, 1, 1, L): -inf at padding; None for an empty mask, (N, 0).

    It has the type in which attention computes, which would otherwise convert it in each layer.
    """
    if not mask.shape[1]:
        return None
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    return torch.zeros_like(mask, dtype=dtype).masked_fill_(~mask, -math.inf)[:, None, None, :]


class _Predictions(nn.Module):
    """The head over the vocabulary, which shares the matrix of the word embeddings."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        dense, norm = nn.Linear(sizes.width, sizes.width), nn.LayerNorm(sizes.width, eps=NORM_EPS)
        self.transform = nn.ModuleDict({"dense": dense, "LayerNorm": norm})
        self.bias = nn.Parameter(torch.zeros(sizes.vocabulary))

    def forward(self, hidden: Tensor, words: Tensor) -> Tensor:
        transformed = self.transform["LayerNorm"](F.gelu(self.transform["dense"](hidden)))
        return F.linear(transformed, words, self.bias)


class BertForMaskedLM(nn.Module):
    """Predicts masked tokens; the head is not computed at other tokens."""

    def __init__(self, sizes: BertSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.bert = _Bert(sizes, pooled=False)
        self.cls = nn.ModuleDict({"predictions": _Predictions(sizes)})
        _initialise(self, sizes.initializer_range)

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor, places: Tensor) -> Tensor:
        """Return logits (M, V) from tokens and types (N, L), a mask (N, L), True at real tokens, and positions (M,).

        The mask is (N, 0) without padding. Position n x L + l is that of token l of sequence n.
        """
        hidden = self.bert(tokens, types, mask, places)  # M W
        logits: Tensor = self.cls["predictions"](hidden, self.bert.embeddings.word_embeddings.weight)
        return logits


class BertForClassification(nn.Module):
    """Predicts one of K classes for each sequence, from its first token."""

    def __init__(self, sizes: BertSizes, classes: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.bert = _Bert(sizes, pooled=True)
        self.dropout = Dropout(sizes.dropout if sizes.classifier_dropout is None else sizes.classifier_dropout)
        self.classifier = nn.Linear(sizes.width, classes)
        _initialise(self, sizes.initializer_range)

    def forward(self, tokens: Tensor, types: Tensor, mask: Tensor) -> Tensor:
        """Return logits (N, K) from tokens and types (N, L) and a mask (N, L) that is True at real tokens.

        The mask is (N, 0) without padding.
        """
        first = self.bert(tokens, types, mask, _first_positions(tokens, tokens.device))  # N W
        logits: Tensor = self.classifier(self.dropout(torch.tanh(self.bert.pooler["dense"](first))))
        return logits


Bert = BertForMaskedLM | BertForClassification


def _initialise(model: nn.Module, deviation: float) -> None:
    """Initialise weights from a normal distribution and biases to 0; norms keep torch's initial values."""
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Embedding):
            nn.init.normal_(layer.weight, std=deviation)
        if isinstance(layer, nn.Linear):
            nn.init.zeros_(layer.bias)


def freeze_embeddings(model: Bert) -> None:
    """Freeze the embeddings of words, positions and segments, and their norm."""
    model.bert.embeddings.requires_grad_(requires_grad=False)


def require_slices(sizes: BertSizes, ranks: int) -> None:
    """Raise BadInput if this number of ranks cannot have equal slices of each layer."""
    for noun, count in (("heads", sizes.heads), ("intermediate units", sizes.intermediate)):
        if count % ranks:
            fewer = max(n for n in range(1, ranks) if sizes.heads % n == 0 and sizes.intermediate % n == 0)
            raise BadInput(f"--tensor {ranks}: does not divide the model's {count} {noun}. Pass --tensor {fewer}.")


def slice_layers(model: Bert, rank: int, ranks: int) -> None:
    """Keep only this rank's share of each layer's heads and feed-forward units; the rest is whole on all ranks."""
    layers: Iterable[Any] = model.bert.encoder["layer"].children()
    for layer in layers:
        attention, intermediate = layer.attention["self"], layer.intermediate
        for name in ("query", "key", "value"):
            setattr(attention, name, ColumnParallelLinear(getattr(attention, name), rank, ranks))
        intermediate["dense"] = ColumnParallelLinear(intermediate["dense"], rank, ranks)
        for inputs_of in (attention, intermediate["dense"]):
            inputs_of.register_forward_pre_hook(send_to_slices)
        for output in (layer.attention["output"], layer.output):
            output.dense = RowParallelLinear(output.dense, rank, ranks)
        attention.per_rank_draws = partial(per_rank_draws, rank)


def blocks(model: Bert) -> Blocks:
    """Return the blocks in forward order; the last layer and its head form one block: the head selects positions."""
    *layers, last = (f"bert.encoder.layer.{number}" for number in range(model.sizes.layers))
    if isinstance(model, BertForMaskedLM):
        head = Block(name="cls", modules=(last, "cls", _WORDS), run=partial(_run_predictions, last))
    else:
        modules = (last, "bert.pooler", "dropout", "classifier")
        head = Block(name="classifier", modules=modules, run=partial(_run_classifier, last))
    return Blocks(
        row=(
            Block(name="bert.embeddings", modules=("bert.embeddings",), run=_run_embeddings),
            *(Block(name=name, modules=(name,), run=partial(_run_layer, name)) for name in layers),
            head,
        ),
        batch_dims=2,
    )


def _run_embeddings(model: nn.Module, _: Tensor | None, inputs: Inputs) -> Tensor:
    hidden: Tensor = model.get_submodule("bert.embeddings")(inputs[0], inputs[1])
    return hidden


def _run_layer(
    name: str, model: nn.Module, hidden: Tensor | None, inputs: Inputs, places: Tensor | None = None
) -> Tensor:
    assert hidden is not None
    output: Tensor = model.get_submodule(name)(hidden, _bias(inputs[2], hidden), places)
    return output


def _run_predictions(last: str, model: nn.Module, hidden: Tensor | None, inputs: Inputs) -> Tensor:
    chosen = _run_layer(last, model, hidden, inputs, inputs[3])
    logits: Tensor = model.get_submodule("cls.predictions")(chosen, model.get_parameter(f"{_WORDS}.weight"))
    return logits


def _run_classifier(last: str, model: nn.Module, hidden: Tensor | None, inputs: Inputs) -> Tensor:
    assert hidden is not None
    first = _run_layer(last, model, hidden, inputs, _first_positions(inputs[0], hidden.device))
    pooled = torch.tanh(model.get_submodule("bert.pooler.dense")(first))
    logits: Tensor = model.get_submodule("classifier")(model.get_submodule("dropout")(pooled))
    return logits


def _first_positions(tokens: Tensor, device: torch.device) -> Tensor:
    """Return the positions of the first tokens of sequences (N, L), in the flattened batch."""
    return torch.arange(0, tokens.numel(), tokens.shape[1], device=device)
