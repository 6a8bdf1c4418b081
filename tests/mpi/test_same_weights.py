"""The number of ranks must not matter: same seed and global batch, same weights."""

from functools import cache

import pytest
import torch

from tests.mpi.conftest import EFFNET, end_well, launcher_of
from tests.mpi.interrupted import TINY

# 5 steps of 50 or 51 images; statistics of batch norm are those of all ranks.
WORDS = (*TINY, "--images=251", "--epochs", "1", "--dropout", "0", "--stochastic-depth", "0", "--sync-bn", "--run", "r")
# Sums over ranks and over images are taken in another order, and each step carries the difference on: of the distance
# that other batches make.
TOLERANCE = 0.001


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Weights and running statistics, one after the other; a training is run when it is first asked for."""

    @cache
    def weights(ranks, global_batch=60, *, reducer="bucket"):
        folder = tmp_path_factory.mktemp("trained")
        words = ["--global-batch-size", str(global_batch), "--accumulate-steps", "1", "--reducer", reducer]
        end_well(folder, launcher_of(ranks), ranks, [*EFFNET, *WORDS, *words])
        [file] = folder.glob("runs/effnet/r/checkpoints/best-*/weights.pt")
        tensors = torch.load(file, weights_only=True).values()
        return torch.cat([one.flatten() for one in tensors if one.is_floating_point()])

    return weights


@pytest.mark.parametrize(("ranks", "reducer"), [(3, "bucket"), (2, "horovod")])
def test_more_ranks_give_the_weights_of_one(trained, ranks, reducer):
    one, other_batches = trained(1), trained(1, 48)
    distance = (trained(ranks, reducer=reducer) - one).norm() / (other_batches - one).norm()
    assert distance < TOLERANCE


def test_buckets_give_the_bits_of_horovods_reducer(trained):
    """Two ranks have one order of a sum; three may add them in others."""
    assert torch.equal(trained(2), trained(2, reducer="horovod"))
