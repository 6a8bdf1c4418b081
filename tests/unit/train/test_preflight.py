import sys

import pytest
import torch

from hvdtrain.ranks.comm import SerialComm
from hvdtrain.train import preflight
from hvdtrain.train.preflight import join_ranks, usable_device
from hvdtrain.vision import config
from tests.ranks import Rank
from tests.refusals import refused
from tests.steps import CPU


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
