import sys
from dataclasses import asdict

import pytest
import torch

from hvdtrain.checkpoint.position import Position
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.train import preflight
from hvdtrain.train.order import permutation
from hvdtrain.train.preflight import cut_anew, join_ranks, usable_device
from hvdtrain.vision import config
from tests.ranks import Rank
from tests.refusals import refused
from tests.steps import CPU
from tests.unit.train.trainings import begun


def test_fp16_is_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(lambda: usable_device(SerialComm(), "fp16")).startswith("--precision fp16 needs a GPU")
    assert usable_device(SerialComm(), "bf16") == CPU


@pytest.mark.parametrize("name", ["torch", "nccl", "cuda", "nvidia_driver", "mpi"])
def test_ranks_with_other_versions_are_refused(monkeypatch, name):
    def with_other(said):
        host, facts = said
        fact = f"the version of {name}"
        return [said, [host, {**facts, fact: "another"} if fact in (facts or ()) else facts]]

    monkeypatch.setattr(sys, "argv", ["it"])
    monkeypatch.setattr(preflight, "connect", lambda **_: Rank(0, 2, answers=with_other))
    message = refused(lambda: join_ranks(config.parse, config.scaled()))
    assert message.startswith(f"ranks disagree on the version of {name}: rank 0 on ")
    assert message.endswith("has 'another'; start all ranks with the same command, code and software")


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
    after = cut_anew(training.config, before, training.step, training.feed)
    assert (after.micro_batch, after.global_batch, after.steps_per_epoch) == sizes
    assert training.feed.sizes == after
    assert training.step.average._least == pytest.approx(1 / memory)
    seen = []
    for rank.rank in range(2):
        cut_anew(training.config, before, training.step, training.feed)
        left = training.feed.batches(training.feed.placed(Position(visited=24)))
        seen += [micro.tolist() for one in left for micro in one.micro_batches]
    assert max(map(len, seen)) <= after.micro_batch
    assert sorted(one for micro in seen for one in micro) == sorted(permutation(53, seed=0, epoch=0)[24:].tolist())
    assert (asdict(after) == asdict(before)) == ("global_batch_size" in batch)
