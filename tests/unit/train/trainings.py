"""A training that takes milliseconds per step, on images that can be told apart."""

from dataclasses import replace
from pathlib import Path

import torch

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.train import preflight, training
from hvdtrain.vision import config
from hvdtrain.vision import images as data

CPU = torch.device("cpu")
SMALL = replace(
    config.scaled(), data="digits", model="efficientnet_tiny", batch_size_per_rank=16, epochs=2, dropout=0.3, run="r"
)
TRAIN, TEST = 53, 10  # 4 steps of at most 16 images


class OneOf(SerialComm):
    """One rank of several that are not there but agree."""

    def __init__(self, rank=0, size=1):
        self.rank, self.local_rank, self.size, self.local_size = rank, rank, size, size

    def gather(self, value):
        return [value] * self.size


class Noted(data.Resident):
    """Notes which images were asked for, batch by batch."""

    def __init__(self, count, seed):
        generator = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (count, 3, 16, 16), dtype=torch.uint8, generator=generator)
        super().__init__(pixels, torch.arange(count) % 10)
        self.visited = []

    def batches(self, indices, *rest):
        for one, batch in zip(indices, super().batches(indices, *rest), strict=True):
            self.visited.append(one.tolist())
            yield batch


def images(train=TRAIN):
    plain = {"classes": 10, "height": 16, "mean": (0.5,) * 3, "std": (0.25,) * 3, "mirror": False}
    return data.Images(train=Noted(train, 1), test=Noted(TEST, 2), **plain)


def begun(comm=None, *, train=TRAIN, runs_dir=Path("runs"), **changes):
    """Put together from the settings, before its first step."""
    comm, settings, found = comm or SerialComm(), replace(SMALL, runs_dir=runs_dir, **changes), images(train)
    model = preflight.build_model(comm, settings, found.classes)
    whole = training.assemble(comm, settings, found, model, CPU)
    torch.manual_seed(settings.seed + comm.rank)
    return whole


def weights(one):
    """All that is evaluated or goes on into the next step of a training."""
    models = [one.step.model, *([] if one.average is None else [one.average])]
    return [value.clone() for model in models for value in model.state_dict().values()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
