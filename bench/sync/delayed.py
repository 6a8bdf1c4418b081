"""Applies the sum of step n at step n + 1, and sends it during that step; its accuracy has not been measured.

python bench/run.py accuracy --ways scaled delayed --sizes 2
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

import hvdtrain
from hvdtrain import effnet
from hvdtrain.ranks.comm import HorovodComm
from hvdtrain.ranks.sync import GradientSync
from hvdtrain.vision.settings import RECIPES, resolve


class Delayed:
    """Replaces gradients by the sums of the previous step; the first step has none, and the last sum is not used."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm, self._in_place = MPI.COMM_WORLD.Dup(), MPI.IN_PLACE
        self._coming: tuple[Tensor, Any] | None = None

    def before(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        """Replace the gradients of this rank by the sums of the previous step."""
        gradients = [one.grad for group in optimizer.param_groups for one in group["params"] if one.grad is not None]
        own = torch.cat([one.reshape(-1) for one in gradients])
        sums = torch.zeros_like(own)
        if self._coming is not None:
            sums, request = self._coming
            request.Wait()
        parts = sums.split([one.numel() for one in gradients])
        torch._foreach_copy_(gradients, [part.view_as(one) for part, one in zip(parts, gradients, strict=True)])
        self._coming = own, self._comm.Iallreduce(self._in_place, own.numpy())


def train(out: Path, *, words: Sequence[str]) -> None:
    """Run one rank of hvdtrain.effnet with these options, without its own sum."""
    sys.argv = ["effnet", *words]

    def main(run: hvdtrain.Run[Any]) -> None:
        register_optimizer_step_pre_hook(Delayed().before)  # the program has one optimizer
        with patch.object(HorovodComm, "gradient_sync", lambda *_, **__: GradientSync()):
            effnet.main(run)
        if run.ranks.rank == 0:
            out.write_text("{}")

    hvdtrain.start(main, *RECIPES.values(), resolve=resolve)
