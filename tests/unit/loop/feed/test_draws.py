import random

import numpy as np
import pytest
import torch

from hvdtrain.core.settings import FileSettings
from hvdtrain.loop.feed.datasets import as_split
from hvdtrain.loop.feed.draws import KeyedDraws
from hvdtrain.ranks.comm import SerialComm
from tests.steps import CPU


class Drawing:
    """Draws from all generators, for the samples from `first` on; counts its reads."""

    def __init__(self, first=0):
        self.first, self.reads = first, 0

    def __len__(self):
        return 8

    def __getitem__(self, sample):
        self.reads += 1
        if sample < self.first:
            return torch.zeros(3, dtype=torch.float64)
        return torch.tensor([torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64)  # noqa: NPY002, S311


def drawn(batches, *, first=0, seed=7, epoch=0):
    """What is read for each sample, in these batches, by a rank of its own."""
    split = as_split(Drawing(first), FileSettings(prefetch=0), SerialComm(), seed=seed)
    read = split.batches([torch.tensor(batch) for batch in batches], CPU, epoch)
    samples = [sample for batch in batches for sample in batch]
    return {s: tuple(row) for s, row in zip(samples, torch.cat([one["inputs"] for one in read]).tolist(), strict=True)}


@pytest.mark.parametrize("first", [0, 5])
def test_draws_do_not_depend_on_batches_and_what_was_read_before(first):
    all_at_once = drawn([range(8)], first=first)
    assert drawn([[7, 3], [6, 2], [5], [4, 1, 0]], first=first) == all_at_once
    assert drawn([[6, 1]], first=first) == {sample: all_at_once[sample] for sample in (6, 1)}  # a resumed run
    assert len({number for row in all_at_once.values() for number in row}) == 3 * (8 - first) + (first > 0)


def test_each_seed_epoch_and_evaluation_has_its_own_draws():
    streams = [drawn([range(8)], seed=seed, epoch=epoch) for seed in (7, 8) for epoch in (0, 1, None)]
    assert len({number for stream in streams for row in stream.values() for number in row}) == 6 * 8 * 3


def seed():
    torch.manual_seed(1)
    np.random.seed(1)  # noqa: NPY002
    random.seed(1)


@pytest.mark.parametrize("first", [0, 8])
def test_the_generators_of_the_rank_stay_as_they_were(first):
    seed()
    expected = Drawing()[0].tolist()
    seed()
    drawn([[0, 1], [2]], first=first)
    with pytest.raises(TypeError):
        KeyedDraws(Drawing(), 0).__getitems__((0, [1, "two"]))
    assert Drawing()[0].tolist() == expected


def test_a_sample_without_draws_is_read_once_and_by_the_batch_where_the_dataset_can():
    class Rows(Drawing):
        def __getitems__(self, samples):
            return [("batch", self[sample].sum().item()) for sample in samples]

    plain = KeyedDraws(Drawing(first=8), 0)
    plain.__getitems__((0, [1, 2]))
    assert plain._dataset.reads == 2
    assert KeyedDraws(Rows(first=8), 0).__getitems__((0, [1])) == [("batch", 0.0)]
    together = KeyedDraws(Rows(), 0).__getitems__((0, [1, 2]))
    assert [one.tolist() for one in together] == [list(drawn([range(8)], seed=0)[sample]) for sample in (1, 2)]
