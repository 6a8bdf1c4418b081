"""Whether all ranks, and a run that is resumed, have the same data, judged by a few samples of each split."""

from collections.abc import Mapping
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hvdtrain.core.phases import READS_HERE
from hvdtrain.loop.feed.feed import Resident, Split
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.safety.exits import BadInput, print_message

_CPU = torch.device("cpu")


def require_same_data(comm: Comm, train: Split, test: Split) -> str | None:
    """Return a hash of both splits; raise BadInput on all ranks if they differ.

    The hash is None if a rank does not read a sample twice alike: then only the numbers of samples are compared.
    """
    splits = {"training": train, "test": test}
    of_ranks = comm.allgather({kind: [len(split), _hash(split)] for kind, split in splits.items()})
    unsteady = {rank for rank, facts in enumerate(of_ranks) if any(not hashed for _, hashed in facts.values())}
    for rank, facts in enumerate(of_ranks):
        for kind, (samples, hashed) in facts.items():
            first_samples, first_hash = of_ranks[0][kind]
            if samples != first_samples or (not unsteady and hashed != first_hash):
                count = f" ({samples}, not {first_samples})" if samples != first_samples else ""
                raise BadInput(
                    f"rank {rank} has other {kind} samples than rank 0{count}. Give all ranks the same samples in the "
                    "same order: hvdtrain divides them among the ranks."
                )
    if not unsteady:
        return sha256(repr(of_ranks[0]).encode()).hexdigest()
    if comm.rank == 0:
        print_message(
            "note",
            f"rank {min(unsteady)} has read a sample twice and got different values, so hvdtrain does not compare the "
            "data of the ranks. Draw from torch, numpy.random or random: hvdtrain seeds them for each sample.",
        )
    return None


def _hash(split: Split) -> str:
    """Hash the first, the middle and the last sample; empty if they are not the same when they are read again."""
    ends = sorted({0, len(split) // 2, len(split) - 1} if len(split) else ())
    hashed, again = (sha256(repr(_samples(split, ends)).encode()).hexdigest() for _ in range(2))
    return hashed if hashed == again else ""


def _samples(split: Split, wanted: list[int]) -> list[Any]:
    """Return what identifies each of these samples."""
    if isinstance(split, Resident):  # which may be on a GPU, and stays there
        batches = [{name: tensor[[sample]] for name, tensor in split.tensors.items()} for sample in wanted]
    else:
        batches = list(split.batches([torch.tensor([one]) for one in wanted], _CPU, None, READS_HERE))
    return [[(name, *_facts(value)) for name, value in batch.items()] for batch in batches]


def _facts(value: Any) -> tuple[Any, ...]:
    if isinstance(value, Tensor):
        return (str(value.dtype), *value.shape, _summary(value))
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf" and value.dtype.itemsize <= 8:
        return _facts(torch.from_numpy(np.array(value, value.dtype.newbyteorder("="), order="C")))
    if isinstance(value, Mapping):
        return tuple((repr(name), *_facts(one)) for name, one in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_facts, value))
    if isinstance(value, set | frozenset):  # its order differs between processes
        return tuple(sorted(map(repr, value)))
    plain = isinstance(value, str | bytes | bool | int | float | complex | np.generic | None)
    return (repr(value) if plain else type(value).__name__,)  # an object's text may have its address


def _summary(values: Tensor) -> str:
    """Return the values as bytes; of floating-point numbers a sum, since processors differ in the last bits."""
    values = values.detach().to(_CPU)
    if not (values.is_floating_point() or values.is_complex()):
        return sha256(values.contiguous().numpy().tobytes()).hexdigest()
    sizes = values.abs().double().flatten()
    return f"{float((sizes * torch.linspace(1, 2, len(sizes), dtype=torch.float64)).sum()):.4g}"
