"""Which tokens are masked, as a function of seed, epoch, sample and place. N sequences of a batch, L tokens, M masked.

Integers alone: the same on every device and for every number of ranks. BERT's rule (Devlin et al. 2019): 15 % of a
sequence's tokens are to be predicted; of these 80 % become [MASK], 10 % another token, 10 % stay.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

_ENDS = 2  # [CLS] and [SEP] are never masked
_NEVER = torch.iinfo(torch.int64).max
_GOLDEN = (
    -0x61C8864680B583EB
)  # 2**64 / golden ratio, as a signed number; this and _mixed: splitmix64, Steele et al. 2014
_EVALUATION = -1  # in place of an epoch: what is masked there is the same in all runs


@dataclass(frozen=True, kw_only=True)
class Masked:
    """A batch whose masked tokens are to be predicted."""

    tokens: Tensor  # (N, L)
    places: Tensor  # (M,) into the flattened tokens
    targets: Tensor  # (M,)


def masked_tokens(lengths: Tensor) -> Tensor:
    """How many tokens are masked in sequences of these lengths (N,), [CLS] and [SEP] included: 15 %, at least one."""
    words = (lengths - _ENDS).clamp(min=0)
    return ((15 * words + 50) // 100).clamp(min=1).minimum(words)


def masked(
    tokens: Tensor, lengths: Tensor, samples: Tensor, *, seed: int, epoch: int | None, mask_id: int, vocabulary: int
) -> Masked:
    """Tokens (N, L) of these samples (N,), with those masked that an epoch, or without one the evaluation, masks.

    `lengths` (N,) are on the host, so that it need not wait for the device to know how many are masked; for a GPU in
    pinned memory, or it waits to copy them.
    """
    device, length = tokens.device, tokens.shape[1]
    total, lengths = int(masked_tokens(lengths).sum()), lengths.to(device, non_blocking=True)
    place = torch.arange(length, device=device)
    words = (place > 0) & (place < lengths[:, None] - 1)  # (N, L)
    drawn = hashed(samples, length, seed=0 if epoch is None else seed, epoch=_EVALUATION if epoch is None else epoch)
    order = torch.where(words, drawn, _NEVER).argsort(1)
    chosen = torch.zeros_like(words).scatter(1, order, place < masked_tokens(lengths)[:, None])
    places = chosen.flatten().nonzero_static(size=total).flatten()  # (M,)
    flat = tokens.flatten()
    targets = flat[places]
    fate, other = _mixed(drawn.flatten()[places] + 1), _mixed(drawn.flatten()[places] + 2)
    share = _shifted(fate, 1) % 10
    shown = torch.where(share < 8, mask_id, torch.where(share == 8, _shifted(other, 1) % vocabulary, targets))
    return Masked(tokens=flat.index_put((places,), shown).view_as(tokens), places=places, targets=targets)


def hashed(samples: Tensor, length: int, *, seed: int, epoch: int) -> Tensor:
    """Numbers of 63 bits (N, L), one for each sample (N,) and place."""
    key = int(_mixed(_mixed(torch.tensor(seed) + _GOLDEN) + epoch))
    rows = _mixed(_mixed(samples * _GOLDEN) ^ key)  # (N,)
    places = _mixed(torch.arange(1, length + 1, device=samples.device) * _GOLDEN)  # (L,)
    return _shifted(_mixed(_mixed(rows[:, None] ^ places) + rows[:, None]), 1)


def _mixed(bits: Tensor) -> Tensor:
    bits = (bits ^ _shifted(bits, 30)) * -0x40A7B892E31B1A47
    bits = (bits ^ _shifted(bits, 27)) * -0x6B2FB644ECCEEE15
    return bits ^ _shifted(bits, 31)


def _shifted(bits: Tensor, by: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift repeats the sign."""
    return (bits >> by) & ((1 << (64 - by)) - 1)
