import random

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, random_split

import hvdtrain
from hvdtrain.checkpoint.changes import describe_changes, describe_run
from hvdtrain.loop.feed.datasets import as_split
from hvdtrain.program.same_data import _facts, require_same_data
from hvdtrain.ranks.comm import SerialComm
from tests.ranks import Rank
from tests.refusals import refused, require_facts

SETTINGS = hvdtrain.Settings(prefetch=0)


class Rows(Dataset):
    """Rows of a table, each changed by a function of the row."""

    def __init__(self, samples=9, change=lambda row: row):
        self.rows, self.change = torch.arange(3.0 * samples).view(samples, 3), change

    def __len__(self):
        return len(self.rows)

    def __getitem__(self, sample):
        return {"row": self.change(self.rows[sample]), "label": sample}


def split_of(data):
    return as_split(data, SETTINGS, SerialComm(), seed=3)


def compared(ours, theirs, *, test=None):
    """Compare the data of two ranks; return the hash."""
    test = split_of(Rows()) if test is None else test

    def answers(value):
        other = Rank(0, 1)
        require_same_data(other, test, split_of(theirs))
        return [value, other.said[0]]

    return require_same_data(Rank(0, 2, answers=answers), test, split_of(ours))


def drawn_alike(row):
    return row + torch.rand(3) + np.random.rand() + random.random()  # noqa: NPY002, S311


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Rows(), Rows(10)),
        (Rows(), Rows(change=lambda row: row + 1)),
        (Rows(), [Rows()[sample] for sample in range(8, -1, -1)]),
        (Rows().rows, Rows().rows.flip(0)),
        (Rows().rows.long(), Rows().rows.long() + 1),
        (Rows().rows, Rows().rows.double()),
        (random_split(Rows(50), [0.5, 0.5])[0], random_split(Rows(50), [0.5, 0.5])[0]),
    ],
)
def test_ranks_with_other_samples_are_refused(ours, theirs):
    require_facts(
        refused(lambda: compared(ours, theirs)), "rank 1 has other test samples than rank 0 ... Give all ranks"
    )


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (Rows(), Rows()),
        (Rows(change=drawn_alike), Rows(change=drawn_alike)),
        (Rows().rows, Rows().rows * (1 + 1e-7)),  # of another processor
        ([{"row": torch.ones(2 + sample)} for sample in range(3)][:1], [{"row": torch.ones(2)}]),
    ],
)
def test_ranks_with_the_same_samples(ours, theirs, capsys):
    assert compared(ours, theirs)
    assert not capsys.readouterr().err


@pytest.mark.parametrize("meta", [object, lambda: {"tags": {"a", "b"}}, lambda: [np.ones(2), "x", None]])
def test_what_a_sample_has_beside_tensors_is_compared_without_addresses(meta):
    one, other = _facts({"x": torch.ones(1), "meta": meta()}), _facts({"x": torch.ones(1), "meta": meta()})
    assert one == other
    assert "0x" not in repr(one)


def test_samples_that_are_never_the_same_are_not_compared(capsys):
    generator = np.random.default_rng()
    unsteady = Rows(change=lambda row: row * generator.random())
    assert compared(Rows(), unsteady) is None
    note = "hvdtrain: note: rank 1 has read a sample twice and got different values ... Draw from torch"
    require_facts(capsys.readouterr().err, note)
    require_facts(refused(lambda: compared(Rows(10), unsteady)), "rank 1 has other test samples")


def test_a_resumed_run_has_the_same_data():
    hashes = [
        require_same_data(Rank(), split_of(Rows()), split_of(Rows(7, change))) for change in (drawn_alike, torch.neg)
    ]
    saved, current, unknown = (
        describe_run({"epochs": 2, "seed": 5}, np=1, global_batch=4, samples=9, unit="samples", data=data)
        for data in (*[hashes[0], hashes[1]], None)
    )
    saved["position"] = {"epoch": 0, "visited": 0}
    line = refused(lambda: describe_changes(saved, {**current, "data": "other"}, hvdtrain.Settings))
    require_facts(line, "training or test samples: some are not those ... --seed 5")
    for same in (saved, unknown):
        describe_changes(saved, same, hvdtrain.Settings)
