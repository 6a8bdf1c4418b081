"""The number of ranks must not matter: same seed and global batch, same weights."""

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.mpi.conftest import PROGRAMS, end_well

# Sums over ranks and over images are taken in another order, and each of the 10 steps carries the difference on.
# Two orders of one float32 sum differ by about 1e-7 of it; a thousandfold is left for 10 steps through 8 blocks, while
# one image more or less in one of 40 moves the weights by a hundredth of their way.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """What the ranks of one training have left, by launcher, ranks and words; it is run when it is first asked for."""

    @cache
    def answers(launcher, ranks, *words, reducer="horovod"):
        words = *words, reducer
        folder = tmp_path_factory.mktemp("trained")
        end_well(folder, launcher, ranks, [str(PROGRAMS / "train_steps.py"), str(folder), *words])
        return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]

    return answers


def weights(answers, rank=0):
    """And batch norm's running statistics."""
    return torch.load(Path(answers[0]["folder"]) / f"weights-{rank}.pt", weights_only=True)


def distance(one, other, answers):
    """Between the ends of two runs, in units of the way the weights moved."""
    return ((weights(one) - weights(other)).norm() / answers[0]["moved"]).item()


@pytest.mark.parametrize(("ranks", "micro_batch", "reducer"), [(3, "17", "bucket"), (2, "7", "horovod")])
def test_more_ranks_give_the_weights_of_one(trained, ranks, micro_batch, reducer):
    """201 images in batches of 40 or 41, which ranks do not share equally."""
    one = trained("python", 1, "50", "50", "frozen")
    many = trained("mpirun", ranks, "50", micro_batch, "frozen", reducer=reducer)
    assert one[0]["moved"] > 0.05
    assert distance(one, many, one) < TOLERANCE
    for rank in range(1, ranks):
        assert torch.equal(weights(many, rank), weights(many))


def test_buckets_give_the_bits_of_horovods_reducer(trained):
    """Two ranks have one order of a sum; three may add them in others."""
    hooks, buckets = (trained("mpirun", 2, "50", "7", "frozen", reducer=one) for one in ("horovod", "bucket"))
    assert torch.equal(weights(buckets), weights(hooks))
    assert torch.equal(weights(buckets, 1), weights(buckets))


def test_synced_batch_norm_is_that_of_one_rank(trained):
    """Weights and running statistics; 67 images are not shared equally."""
    one = trained("python", 1, "67", "67", "synced")
    many = trained("mpirun", 2, "67", "34", "synced")
    assert distance(one, many, one) < 10 * TOLERANCE
    assert torch.equal(weights(many, 1), weights(many))


def test_another_batch_would_be_noticed(trained):
    """The tolerance can fail: six batches of 33 or 34 are far outside."""
    one = trained("python", 1, "50", "50", "frozen")
    other = trained("python", 1, "40", "40", "frozen")
    assert distance(one, other, one) > 100 * TOLERANCE


def test_every_sample_is_seen_once_per_epoch(trained):
    answers = trained("mpirun", 3, "50", "17", "frozen", reducer="bucket")
    for epoch in range(2):
        seen = [sample for answer in answers for sample in answer["seen"][epoch]]
        assert sorted(seen) == list(range(201))
    orders = [[answer["seen"][epoch] for answer in answers] for epoch in range(2)]
    assert orders[0] != orders[1]
