"""Sequences for ours and its peers, and transformers' BERT in our sizes."""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor

from hvdtrain.text.masks import mask_tokens
from hvdtrain.text.model import sizes_of

VOCABULARY, MASK = 4096, 4
PASSED_OVER = -100


@dataclass(frozen=True, kw_only=True)
class Sequences:
    """One batch: N sequences that are filled up to L tokens."""

    tokens: Tensor  # (N, L)
    lengths: Tensor  # (N,), on the host
    samples: Tensor  # (N,), on the host


def sequences(chosen: argparse.Namespace, device: torch.device, seed: int) -> Sequences:
    """Of half of --tokens to all; the same lengths for every seed."""
    lengths = torch.linspace(chosen.tokens // 2, chosen.tokens, chosen.batch).long()
    tokens = torch.randint(
        MASK + 1, VOCABULARY, (chosen.batch, chosen.tokens), generator=torch.Generator().manual_seed(seed)
    )
    inside = torch.arange(chosen.tokens) < lengths[:, None]
    return Sequences(tokens=tokens.where(inside, 0).to(device), lengths=lengths, samples=torch.arange(chosen.batch))


def for_transformers(batch: Sequences, epoch: int = 0) -> dict[str, Tensor]:
    """With masks, as its model takes them."""
    options = {"seed": 0, "epoch": epoch, "mask_id": MASK, "vocabulary": VOCABULARY}
    found = mask_tokens(batch.tokens, batch.lengths, batch.samples.to(batch.tokens.device), **options)
    labels = torch.full_like(batch.tokens, PASSED_OVER)
    labels.view(-1)[found.places] = found.targets
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    inside = place < batch.lengths.to(batch.tokens.device)[:, None]
    return {"input_ids": found.tokens, "attention_mask": inside.long(), "labels": labels}


def their_bert(model: str) -> torch.nn.Module:
    """The BERT of transformers, in the sizes of ours."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = sizes_of(model, vocabulary=VOCABULARY)
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=sizes.vocabulary,
        hidden_size=sizes.width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        intermediate_size=sizes.intermediate,
        initializer_range=sizes.initializer_range,
    )
    found: torch.nn.Module = BertForMaskedLM(config)
    return found
