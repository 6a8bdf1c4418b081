"""A model of one's own; the first word names what is special about the program: its data or its loop."""

import sys

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset

import hvdtrain

variant = sys.argv.pop(1) if __name__ == "__main__" else ""
generator = torch.Generator().manual_seed(0)
inputs = torch.randn(200, 8, generator=generator)
targets = inputs[:, :4].argmax(1)
SETS = {"near": range(160, 175), "far": range(175, 200)}  # of the test


def losses(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["targets"], reduction="none")


class Samples(Dataset):
    def __init__(self, rows):
        self.rows = rows

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, index):
        return {"name": f"sample {index}", **columns(self.rows[index])}


def columns(rows):
    return {"inputs": inputs[rows], "targets": targets[rows]}


def break_on_rank_1(run, event):
    return run.ranks.rank == 1


def break_at_step_2(run, event):
    return event.step == 2


def stop_on_rank_1(run, event):
    run.started.state["items"] = run.started.state.get("items", 0) + 1
    if run.ranks.rank == 1 and event.step == 2:
        run.started.stop("rank 1 has seen enough")
    return False


def odd_on_rank_1(run, event):
    if run.ranks.rank == 1:
        raise hvdtrain.BadInput("it has met something odd")
    return False


def odd(run, event):
    raise hvdtrain.BadInput("all have met something odd")


ENDS = {end.__name__: end for end in (break_on_rank_1, break_at_step_2, stop_on_rank_1, odd_on_rank_1, odd)}


def main(run):
    train = inputs[:160], targets[:160]
    if variant == "shards":
        train = (inputs[run.ranks.rank : 160 : run.ranks.size], targets[run.ranks.rank : 160 : run.ranks.size])
    training = run.training(
        lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)),
        losses,
        Samples(range(160)) if variant == "dataset" else train,
        {name: (Samples if variant == "dataset" else columns)(rows) for name, rows in SETS.items()},
    )
    for event in training:
        if variant in ENDS and ENDS[variant](run, event):
            break


if __name__ == "__main__":
    hvdtrain.start(main, hvdtrain.Settings)
