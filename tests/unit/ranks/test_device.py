import socket
from types import SimpleNamespace

import pytest
import torch

from hvdtrain.ranks import device
from hvdtrain.ranks.device import choose_device, require_own_device
from tests.ranks import saying
from tests.refusals import refused, require_facts

CUDA = torch.device("cuda", 0)


@pytest.fixture
def gpus(monkeypatch):
    """Make believe that so many GPUs are visible; returns the indices that were chosen."""

    def pretend(count):
        chosen = []
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: chosen.append(device.index))
        return chosen

    return pretend


def test_without_gpus_the_cpu_is_chosen_and_no_nccl_needed(gpus, monkeypatch):
    chosen = gpus(0)
    monkeypatch.setattr(device, "has_nccl", lambda: False)
    monkeypatch.setattr(device, "sees_gpus", lambda: False)
    assert choose_device(saying(None, local_rank=3, local_size=4)) == torch.device("cpu")
    assert chosen == []


def test_gpus_that_torch_cannot_use_are_no_reason_to_train_on_the_cpu(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setattr(device, "sees_gpus", lambda: True)
    message = refused(lambda: choose_device(saying(None, local_rank=0, local_size=1)))
    require_facts(
        message, f"{socket.gethostname()}: torch {torch.__version__} ... driver ... nvidia-smi ... --gpus none"
    )


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [(8, 7, 7), (1, 3, 0)],  # one visible: the launcher gave each rank its own
)
def test_each_local_rank_gets_its_gpu(gpus, visible, local_rank, index):
    chosen = gpus(visible)
    own = choose_device(saying(None, local_rank=local_rank, local_size=visible))
    assert own == torch.device("cuda", index)
    assert chosen == [index]


def test_more_ranks_than_gpus_names_host_and_counts(gpus):
    chosen = gpus(2)
    message = refused(lambda: choose_device(saying(None, local_rank=2, local_size=3)))
    require_facts(message, f"{socket.gethostname()}: 3 ranks ... 2 visible GPUs ... at most 2")
    assert chosen == []


@pytest.mark.parametrize(("built", "ranks", "refuses"), [(False, 2, True), (True, 2, False), (False, 1, False)])
def test_gpus_whose_horovod_has_no_nccl_are_refused(gpus, monkeypatch, built, ranks, refuses):
    chosen = gpus(2)
    monkeypatch.setattr(device, "has_nccl", lambda: built)
    those = saying(*[None] * ranks, local_rank=0, local_size=1)
    if refuses:
        message = refused(lambda: choose_device(those))
        require_facts(message, "Horovod ... without NCCL ... GPU=1 make setup")
    else:
        assert choose_device(those) == CUDA
    assert chosen == ([] if refuses else [0])


def test_two_ranks_on_one_gpu_are_named_with_host_and_uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a"))
    require_own_device(saying(["one", "GPU-a"], ["one", "GPU-b"], ["two", "GPU-a"]), CUDA)
    require_own_device(saying(["one", None], ["one", None]), torch.device("cpu"))
    ranks = saying(["one", "GPU-b"], ["two", "GPU-a"], ["one", "GPU-c"], ["two", "GPU-a"])
    message = refused(lambda: require_own_device(ranks, CUDA))
    require_facts(message, "ranks 1 and 3 on two ... GPU GPU-a")
    assert ranks.said == [[socket.gethostname(), "GPU-a"]]
