"""What the programs of one comparison are given, ours and its peers: the same model, tensors and clock, one answer.

A program gets `asked()` from its command line, goes through a `Loader`, and answers. The loader's few batches live on
the device and are used in turns: reading and augmenting are other questions (bench/input.py).
"""

import argparse
import itertools
import json
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from mlp import mlp
from torch import Tensor, nn

from hvdtrain.tracking import peaks
from hvdtrain.vision import models

WARMUP_STEPS = 6
BATCHES = 4  # in turns
CLASSES = 10
LR = 0.01


def asked() -> argparse.Namespace:
    """The words of a program: the file for its answer, and what to train."""
    words = argparse.ArgumentParser()
    words.add_argument("out", type=Path)
    words.add_argument("--model", default="efficientnet_b0", help="mlp, or one of hvdtrain.vision.models")
    words.add_argument("--batch", type=int, default=16, help="samples per rank and step")
    words.add_argument("--tokens", type=int, default=64, help="of the longest sequence, for a BERT")
    words.add_argument("--steps", type=int, default=20, help=f"timed ones, after {WARMUP_STEPS} others")
    words.add_argument("--precision", choices=("fp32", "bf16"), default="fp32")
    words.add_argument("--compile", action="store_true")
    words.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting, for ours alone")
    return words.parse_args()


def fast_kernels() -> None:
    """What hvdtrain lets a GPU do, and whoever wants speed."""
    torch.backends.cudnn.benchmark = True
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True


def network(model: str) -> nn.Module:
    """The model for (N, 3, 32, 32) images, the same on all ranks."""
    torch.manual_seed(0)
    return mlp(CLASSES) if model == "mlp" else models.build(model, classes=CLASSES)


def peer_network(model: str) -> nn.Module:
    """The same weights as a peer's user has them: torchvision's own model, whose activations are in place."""
    built = network(model)
    for module in built.modules():
        if isinstance(module, nn.SiLU):
            module.inplace = True
    return built


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The one of recipe `scaled`, as a peer makes it."""
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9, nesterov=True, weight_decay=5e-4, fused=True)


def autocast(chosen: argparse.Namespace, device: torch.device) -> torch.autocast:
    """The precision that was asked for."""
    return torch.autocast(device.type, torch.bfloat16, enabled=chosen.precision == "bf16")


def tensors(
    batch: int, device: torch.device, rank: int, memory_format: torch.memory_format = torch.channels_last
) -> list[tuple[Tensor, Tensor]]:
    """The rank's batches: images (N, 3, 32, 32) of mean 0 and deviation 1, and labels (N,)."""
    random = torch.Generator().manual_seed(rank)
    made = [
        (torch.randn(batch, 3, 32, 32, generator=random), torch.randint(0, CLASSES, (batch,), generator=random))
        for _ in range(BATCHES)
    ]
    return [(images.to(device, memory_format=memory_format), labels.to(device)) for images, labels in made]


class StepClock:
    """When each step began: by the host's clock, or by the GPU's, which does not wait for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[float] = []
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        """A step begins, or the last one has ended."""
        if self._device.type == "cuda":
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._events.append(event)
        else:
            self._marks.append(time.perf_counter())

    def step_s(self) -> list[float]:
        """Of the steps after the warm-up."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            spent = [start.elapsed_time(end) / 1000 for start, end in itertools.pairwise(self._events)]
        else:
            spent = [end - start for start, end in itertools.pairwise(self._marks)]
        return spent[WARMUP_STEPS:]


class Loader:
    """A peer's batches, as a DataLoader would give them; it times the steps from one batch to the next."""

    def __init__(
        self,
        chosen: argparse.Namespace,
        device: torch.device,
        rank: int = 0,
        memory_format: torch.memory_format = torch.channels_last,
    ) -> None:
        self._chosen, self._device, self._rank = chosen, device, rank
        self._tensors = tensors(chosen.batch, device, rank, memory_format)
        self._clock = StepClock(device)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(WARMUP_STEPS + self._chosen.steps):
            self._clock.mark()
            yield self._tensors[number % BATCHES]
        self._clock.mark()

    def answer(self) -> None:
        """What rank 0 has measured."""
        if self._rank == 0:
            answer(self._chosen.out, self._clock, self._device)


def answer(out: Path, clock: StepClock, device: torch.device, **more: float) -> None:
    """Leave the times of the steps, the most memory of this rank, and whatever else was measured."""
    out.write_text(json.dumps({"step_s": clock.step_s(), "memory": peaks.process_peaks(device), **more}))
