import os
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.elastic import comm
from hvdtrain.elastic.comm import _owner
from hvdtrain.ranks.comm import HorovodComm


@pytest.mark.parametrize("values", [torch.zeros(12).as_strided((2, 3), (1, 4), 2), torch.zeros(2).int()])
def test_a_tensor_that_horovod_sums_has_an_owner_besides_python(values):
    """Which owns this very tensor, and nothing as large."""
    owner = _owner(values)
    assert owner.grad is values
    assert owner.untyped_storage().nbytes() == values.element_size()


@pytest.mark.parametrize(("given", "level"), [({}, "fatal"), ({"HOROVOD_LOG_LEVEL": "debug"}, "debug")])
def test_horovod_logs_no_error_of_its_own_at_a_loss_unless_the_environment_says_otherwise(monkeypatch, given, level):
    monkeypatch.setattr(os, "environ", dict(given))
    monkeypatch.setattr(comm, "ElasticComm", lambda *_: SimpleNamespace(abort=None))
    monkeypatch.setattr(comm.exits, "set_failure_exit", lambda _: None)
    of_mpi = object.__new__(HorovodComm)
    of_mpi.mpi = object()
    comm.make_elastic(of_mpi, {}, {})
    assert os.environ["HOROVOD_LOG_LEVEL"] == level
