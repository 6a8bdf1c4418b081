import torch

from hvdtrain.program.checks import require_device
from hvdtrain.ranks.comm import SerialComm
from tests.refusals import refused
from tests.steps import CPU


def test_fp16_is_refused_on_cpus(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refused(lambda: require_device(SerialComm(), "fp16")).startswith("--precision fp16 needs a GPU")
    assert require_device(SerialComm(), "bf16") == CPU
