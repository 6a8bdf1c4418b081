import json
import os
import socket
import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from hvdtrain.ranks import comm
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import RANK_VARIABLES, BadInput

CUDA = torch.device("cuda", 0)


class Gathered(SerialComm):
    """A rank whose gather gives what the test prepared, and keeps what the rank itself said."""

    def __init__(self, *answers, rank=0, local_rank=0, local_size=1):
        self.answers, self.rank, self.size = list(answers), rank, len(answers)
        self.local_rank, self.local_size = local_rank, local_size
        self.said = []

    def gather(self, value):
        self.said.append(json.loads(json.dumps(value)))
        return self.answers


def refused(attempt):
    with pytest.raises(BadInput) as error:
        attempt()
    assert "\n" not in str(error.value)
    return str(error.value)


# --- SerialComm


def test_serial_comm_is_alone_and_changes_nothing():
    alone = SerialComm()
    assert (alone.rank, alone.size, alone.local_rank, alone.local_size) == (0, 1, 0, 1)
    assert alone.gather({"a": 1}) == [{"a": 1}]
    alone.start()
    values = torch.tensor([1.0, 2.0])
    assert alone.sum(values).tolist() == [1.0, 2.0]
    alone.average_([values])
    assert values.tolist() == [1.0, 2.0]
    leaf = torch.tensor([1.0, 2.0], requires_grad=True)
    (alone.differentiable_sum(leaf, "some.name") * torch.tensor([3.0, 4.0])).sum().backward()
    assert leaf.grad.tolist() == [3.0, 4.0]


@pytest.mark.parametrize("options", [{}, {"groups": None}, {"groups": 2}])
def test_serial_gradient_sync_keeps_the_gradients(options):
    model = nn.Linear(2, 1)
    alone = SerialComm()
    before = model.weight.detach().clone()
    alone.broadcast_(model)
    sync = alone.gradient_sync(model, compression="none", **options)
    sync.include([("more.weight", nn.Parameter(torch.zeros(1)))])
    sync.expect(1)
    model(torch.tensor([[3.0, 4.0]])).sum().backward()
    sync.finish()
    assert model.weight.grad.tolist() == [[3.0, 4.0]]
    assert torch.equal(model.weight, before)


# --- what ranks agree on


def raising(text):
    def decide():
        raise BadInput(text)

    return decide


def test_agreed_gives_the_decision_of_this_rank():
    ranks = Gathered(["one", None], ["two", None])
    assert comm.agreed(ranks, lambda: 42) == 42
    assert ranks.said == [[socket.gethostname(), None]]


def test_agreed_raises_on_ranks_that_had_no_problem():
    ranks = Gathered(["one", None], ["two", "no such file"], ["three", "other"])
    assert refused(lambda: comm.agreed(ranks, lambda: 42)) == "rank 1 on two: no such file"


def test_agreed_tells_all_ranks_what_this_one_found():
    ranks = Gathered(["one", "broken"], ["two", None])
    assert refused(lambda: comm.agreed(ranks, raising("broken"))) == "rank 0 on one: broken"
    assert ranks.said == [[socket.gethostname(), "broken"]]


def test_agreed_leaves_the_rank_out_where_all_say_the_same():
    assert refused(lambda: comm.agreed(Gathered(["one", "bad"], ["two", "bad"]), raising("bad"))) == "bad"
    differently = Gathered(["one", "bad a"], ["two", "bad b"])
    assert refused(lambda: comm.agreed(differently, raising("bad a"))) == "rank 0 on one: bad a"
    assert refused(lambda: comm.agreed(SerialComm(), raising("bad"))) == "bad"


def test_agreed_lets_other_errors_through():
    ranks = Gathered(["one", None])
    with pytest.raises(ZeroDivisionError):
        comm.agreed(ranks, lambda: 1 / 0)


def test_equal_facts_are_fine():
    ranks = Gathered(["one", {"--lr": "0.1"}], ["two", {"--lr": "0.1"}])
    comm.require_equal(ranks, {"--lr": "0.1"})
    assert ranks.said == [[socket.gethostname(), {"--lr": "0.1"}]]


@pytest.mark.parametrize(
    ("first", "other", "values"),
    [
        ({"--lr": "0.1", "--seed": "0"}, {"--lr": "0.3", "--seed": "0"}, ("--lr", "'0.1'", "'0.3'")),
        ({"steps": 3}, {"steps": 4}, ("steps", "3", "4")),
        ({"steps": 3, "new": 1}, {"steps": 3}, ("new", "1", "None")),
        ({"steps": 3}, {"steps": 3, "new": 1}, ("new", "None", "1")),
    ],
)
def test_different_facts_name_ranks_hosts_and_both_values(first, other, values):
    ranks = Gathered(["one", first], ["one", first], ["two", other])
    name, ours, theirs = values
    message = refused(lambda: comm.require_equal(ranks, first))
    assert f"ranks disagree on {name}: rank 0 on one has {ours}, rank 2 on two has {theirs};" in message


# --- devices


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


def test_without_gpus_the_cpu_is_chosen(gpus):
    chosen = gpus(0)
    assert comm.choose_device(Gathered(None, local_rank=3, local_size=4)) == torch.device("cpu")
    assert chosen == []


@pytest.mark.parametrize(
    ("visible", "local_rank", "index"),
    [(8, 0, 0), (8, 7, 7), (2, 1, 1), (1, 0, 0), (1, 3, 0)],  # one visible: the launcher gave each rank its own
)
def test_each_local_rank_gets_its_gpu(gpus, visible, local_rank, index):
    chosen = gpus(visible)
    device = comm.choose_device(Gathered(None, local_rank=local_rank, local_size=visible))
    assert device == torch.device("cuda", index)
    assert chosen == [index]


def test_more_ranks_than_gpus_names_host_and_counts(gpus):
    chosen = gpus(2)
    message = refused(lambda: comm.choose_device(Gathered(None, local_rank=2, local_size=3)))
    assert message == f"{socket.gethostname()} has 3 ranks but 2 visible GPUs: start at most 2 ranks there"
    assert chosen == []


@pytest.fixture
def uuid(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="GPU-a"))


@pytest.mark.usefixtures("uuid")
def test_two_ranks_on_one_gpu_are_named_with_host_and_uuid():
    ranks = Gathered(["one", "GPU-b"], ["two", "GPU-a"], ["one", "GPU-c"], ["two", "GPU-a"])
    message = refused(lambda: comm.require_own_device(ranks, CUDA))
    assert message.startswith("ranks 1 and 3 on two were both given GPU GPU-a: ")
    assert ranks.said == [[socket.gethostname(), "GPU-a"]]


@pytest.mark.usefixtures("uuid")
def test_a_gpu_each_is_fine():
    comm.require_own_device(Gathered(["one", "GPU-a"], ["one", "GPU-b"], ["two", "GPU-a"]), CUDA)


def test_ranks_may_share_a_cpu():
    ranks = Gathered(["one", None], ["one", None])
    comm.require_own_device(ranks, torch.device("cpu"))
    assert ranks.said == [[socket.gethostname(), None]]


# --- cores


@pytest.mark.parametrize(
    ("own", "launcher", "local_size", "cores"),
    [
        (range(8), range(8), 4, 8),  # unbound: all share what the launcher may use
        ([3], range(8), 4, 4),  # bound to a core each
        ([3], range(8), 8, 8),
        (range(4), range(8), 2, 8),  # bound to a NUMA node each
        (range(4), range(8), 4, 8),  # two ranks to a NUMA node
        (range(4), range(8), 1, 4),  # alone and bound
        ([2, 3], [2, 3], 4, 2),  # a container of two cores
        ([5], [0], 2, 2),  # bound, and so is the launcher, elsewhere
    ],
)
def test_cores_together(monkeypatch, own, launcher, local_size, cores):
    monkeypatch.setattr(os, "getppid", lambda: 4711)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0: set(own), 4711: set(launcher)}[pid])
    assert comm.cores_together(local_size) == cores


# --- connect


@pytest.mark.parametrize(
    ("environment", "threshold_mb", "expected"),
    [
        ({}, None, str(128 * 2**20)),
        ({}, 64.0, str(64 * 2**20)),
        ({}, 0.5, str(2**19)),
        ({}, 0.0, "0"),  # no fusion
        ({"HOROVOD_FUSION_THRESHOLD": "999"}, None, "999"),
        ({"HOROVOD_FUSION_THRESHOLD": "999"}, 64.0, str(64 * 2**20)),
    ],
)
def test_fusion_threshold_option_comes_before_environment_before_default(
    monkeypatch, environment, threshold_mb, expected
):
    environment = dict(environment)
    monkeypatch.setattr(os, "environ", environment)
    found = comm.connect(fusion_threshold_mb=threshold_mb, cycle_time_ms=None)
    assert isinstance(found, SerialComm)
    assert environment == {"HOROVOD_FUSION_THRESHOLD": expected, "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "600"}


@pytest.mark.parametrize(("given", "expected"), [({}, "600"), ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}, "7")])
def test_a_stalled_rank_ends_the_job_after_ten_minutes_unless_the_environment_says_otherwise(
    monkeypatch, given, expected
):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    comm.connect(fusion_threshold_mb=None, cycle_time_ms=None)
    assert environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == expected


@pytest.mark.parametrize(
    ("environment", "cycle_time_ms", "expected"),
    [
        ({}, None, None),
        ({}, 2.5, "2.5"),
        ({"HOROVOD_CYCLE_TIME": "7"}, None, "7"),
        ({"HOROVOD_CYCLE_TIME": "7"}, 2.5, "2.5"),
    ],
)
def test_cycle_time_option_comes_before_environment_and_has_no_default(
    monkeypatch, environment, cycle_time_ms, expected
):
    environment = {"HOROVOD_FUSION_THRESHOLD": "1", **environment}
    monkeypatch.setattr(os, "environ", environment)
    comm.connect(fusion_threshold_mb=None, cycle_time_ms=cycle_time_ms)
    assert environment.get("HOROVOD_CYCLE_TIME") == expected


def test_one_process_needs_neither_mpi_nor_horovod(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    for name in ("mpi4py", "horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now fails
    threads = torch.get_num_threads()
    assert isinstance(comm.connect(fusion_threshold_mb=None, cycle_time_ms=None), SerialComm)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_a_launched_rank_is_not_taken_for_a_single_process(monkeypatch, variable):
    monkeypatch.setattr(os, "environ", {variable: "0"})
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError):
        comm.connect(fusion_threshold_mb=None, cycle_time_ms=None)


@pytest.mark.parametrize(("ranks", "yields"), [("4", "1"), ("3", None)])
def test_ranks_that_fill_their_cores_yield_while_they_wait(monkeypatch, ranks, yields):
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": ranks}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError):  # at the import, which would start MPI, it must be set already
        comm.connect(fusion_threshold_mb=None, cycle_time_ms=None)
    assert environment.get("OMPI_MCA_mpi_yield_when_idle") == yields
