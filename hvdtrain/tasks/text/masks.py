"""Masked tokens as a function of seed, epoch, sample and position. N sequences of a batch, L tokens, M masked.

It uses only integers, so it is equal on every device and for every number of ranks. BERT's rule (Devlin et al. 2019):
15 % of a sequence's tokens are predicted; of these 80 % become [MASK], 10 % become another token, 10 % are kept.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ENDS = 2  # [CLS] and [SEP] are never masked
_NEVER = torch.iinfo(torch.int64).max
_GOLDEN = -0x61C8864680B583EB  # 2**64 / golden ratio, as a signed number; this and _mix: splitmix64, Steele et al. 2014
_EVALUATION = -1  # replaces the epoch: the masks of evaluations are equal in all runs


@dataclass(frozen=True, kw_only=True)
class MaskedBatch:
    """A batch with masked tokens to predict."""

    tokens: Tensor  # (N, L)
    places: Tensor  # (M,) indexes into the flattened tokens
    targets: Tensor  # (M,)


def count_masked(lengths: Tensor) -> Tensor:
    """Return how many tokens are masked in sequences of these lengths (N,) with [CLS] and [SEP]: 15 %, at least one."""
    words = (lengths - _ENDS).clamp(min=0)
    return ((15 * words + 50) // 100).clamp(min=1).minimum(words)


def mask_tokens(
    tokens: Tensor, lengths: Tensor, samples: Tensor, *, seed: int, epoch: int | None, mask_id: int, vocabulary: int
) -> MaskedBatch:
    """Mask the tokens (N, L) of these samples (N,), for an epoch or, without one, for the evaluation.

    `lengths` (N,) are on the host, so that it does not have to wait for the device to count masked tokens. For a GPU
    they must be in pinned memory, or copying them makes the host wait.
    """
    device, length = tokens.device, tokens.shape[1]
    total, lengths = int(count_masked(lengths).sum()), lengths.to(device, non_blocking=True)
    positions = torch.arange(length, device=device)
    is_word = (positions > 0) & (positions < lengths[:, None] - 1)  # (N, L)
    draws = hash_places(
        samples, length, seed=0 if epoch is None else seed, epoch=_EVALUATION if epoch is None else epoch
    )
    order = torch.where(is_word, draws, _NEVER).argsort(1)
    is_chosen = torch.zeros_like(is_word).scatter(1, order, positions < count_masked(lengths)[:, None])
    places = is_chosen.flatten().nonzero_static(size=total).flatten()  # (M,)
    flat = tokens.flatten()
    targets = flat[places]
    fate, other = _mix(draws.flatten()[places] + 1), _mix(draws.flatten()[places] + 2)
    share = _shift_right(fate, 1) % 10
    inputs = torch.where(share < 8, mask_id, torch.where(share == 8, _shift_right(other, 1) % vocabulary, targets))
    return MaskedBatch(tokens=flat.index_put((places,), inputs).view_as(tokens), places=places, targets=targets)


def hash_places(samples: Tensor, length: int, *, seed: int, epoch: int) -> Tensor:
    """Return numbers of 63 bits (N, L), one for each sample (N,) and position."""
    key = int(_mix(_mix(torch.tensor(seed) + _GOLDEN) + epoch))
    rows = _mix(_mix(samples * _GOLDEN) ^ key)  # (N,)
    places = _mix(torch.arange(1, length + 1, device=samples.device) * _GOLDEN)  # (L,)
    return _shift_right(_mix(_mix(rows[:, None] ^ places) + rows[:, None]), 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shift_right(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shift_right(bits, 31)


def _shift_right(bits: Tensor, count: int) -> Tensor:
    """Shift to the right, filling with zeros: torch's own shift repeats the sign."""
    return (bits >> count) & ((1 << (64 - count)) - 1)
