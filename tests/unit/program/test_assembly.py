from dataclasses import asdict

import pytest
import torch

from hvdtrain.core.position import Position
from hvdtrain.loop.feed.order import permutation
from hvdtrain.program.assembly import Repartition
from hvdtrain.program.checks import require_device
from hvdtrain.ranks.comm import SerialComm
from tests.ranks import Rank
from tests.refusals import refused
from tests.steps import CPU
from tests.unit.loop.trainings import begun


def test_fp16_is_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(lambda: require_device(SerialComm(), "fp16")).startswith("--precision fp16 needs a GPU")
    assert require_device(SerialComm(), "bf16") == CPU


def cut_again(training, sizes):
    """The sizes of the batches after ranks were lost, where they were cut into these."""
    repartition = Repartition(training.config, training.job, training.lr, training.step.average)
    training.feed.cut(repartition.ranks_changed(sizes).sizes)
    return training.feed.sizes


@pytest.mark.parametrize(
    ("batch", "sizes", "memory"),
    [
        ({"batch_size_per_rank": 4}, (4, 8, 7), 14),  # 53 images; the memory is of two epochs
        ({"global_batch_size": 12, "ema_epochs": 1.0}, (4, 12, 5), 5),
    ],
)
def test_ranks_that_are_left_cut_the_rest(batch, sizes, memory):
    """Three ranks, then two: the batch per rank is kept, or the global batch by more micro-batches."""
    rank = Rank(2, 3, answers=lambda value: [value] * rank.size)
    training = begun(rank, epochs=100, **batch)
    before = training.feed.sizes
    rank.rank, rank.size = 1, 2
    after = cut_again(training, before)
    assert (after.micro_batch, after.global_batch, after.steps_per_epoch) == sizes
    assert training.step.average._least == pytest.approx(1 / memory)
    seen = []
    for rank.rank in range(2):
        cut_again(training, before)
        left = training.feed.batches(training.feed.align(Position(visited=24)))
        seen += [micro.tolist() for one in left for micro in one.indices]
    assert max(map(len, seen)) <= after.micro_batch
    assert sorted(one for micro in seen for one in micro) == sorted(permutation(53, seed=0, epoch=0)[24:].tolist())
    assert (asdict(after) == asdict(before)) == ("global_batch_size" in batch)
