import os
import sys
from pathlib import Path

import pytest
import torch

from hvdtrain.ranks import connect
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.safety.exits import RANK_VARIABLES
from hvdtrain.safety.watchdog import WAIT_MARGIN_S, slow_limit_s
from tests.refusals import refused


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
    found = connect.connect(fusion_threshold_mb=threshold_mb, cycle_time_ms=None)
    assert isinstance(found, SerialComm)
    assert environment == {
        "HOROVOD_FUSION_THRESHOLD": expected,
        "HOROVOD_CACHE_CAPACITY": "4096",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "660",
    }


@pytest.mark.parametrize(
    ("given", "hang_timeout_s", "expected"),
    [
        ({}, None, "660"),
        ({}, 0.0, "660"),
        ({}, 2.0, "660"),
        ({}, 120.0, "1260"),
        ({"HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "7"}, 120.0, "7"),
    ],
)
def test_horovod_ends_a_stalled_job_later_than_any_watchdog_unless_the_environment_says_otherwise(
    monkeypatch, given, hang_timeout_s, expected
):
    environment = dict(given)
    monkeypatch.setattr(os, "environ", environment)
    connect.connect(fusion_threshold_mb=None, cycle_time_ms=None, hang_timeout_s=hang_timeout_s)
    longest_s = slow_limit_s(hang_timeout_s) + WAIT_MARGIN_S
    assert given or float(expected) > longest_s
    assert environment["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"] == expected


@pytest.mark.parametrize(("variable", "own"), [("HOROVOD_CACHE_CAPACITY", "4096")])
@pytest.mark.parametrize("given", [None, "0"])
def test_horovods_names_and_completion_are_set_unless_the_environment_says_otherwise(monkeypatch, variable, own, given):
    environment = {} if given is None else {variable: given}
    monkeypatch.setattr(os, "environ", environment)
    connect.connect(fusion_threshold_mb=None, cycle_time_ms=None)
    assert environment[variable] == (own if given is None else given)


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
    connect.connect(fusion_threshold_mb=None, cycle_time_ms=cycle_time_ms)
    assert environment.get("HOROVOD_CYCLE_TIME") == expected


def test_one_process_needs_neither_mpi_nor_horovod(monkeypatch):
    monkeypatch.setattr(os, "environ", {})
    for name in ("mpi4py", "horovod", "horovod.torch"):
        monkeypatch.setitem(sys.modules, name, None)  # importing it now fails
    threads = torch.get_num_threads()
    assert isinstance(connect.connect(fusion_threshold_mb=None, cycle_time_ms=None), SerialComm)
    assert torch.get_num_threads() == threads


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_a_launched_rank_is_not_taken_for_a_single_process(monkeypatch, variable):
    monkeypatch.setattr(os, "environ", {variable: "0"})
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError):
        connect.connect(fusion_threshold_mb=None, cycle_time_ms=None)


@pytest.mark.parametrize(("ranks", "yields"), [("4", "1"), ("3", None)])
def test_ranks_that_fill_their_cores_yield_while_they_wait(monkeypatch, ranks, yields):
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": ranks}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr("hvdtrain.ranks.cores.ROOT", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError):  # at the import, which would start MPI, it must be set already
        connect.connect(fusion_threshold_mb=None, cycle_time_ms=None)
    assert environment.get("OMPI_MCA_mpi_yield_when_idle") == yields


def test_ranks_that_lack_horovod_are_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr(connect, "HorovodComm", lambda _: SerialComm())
    monkeypatch.setattr(connect, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "mpi4py", type("mpi4py", (), {"MPI": type("MPI", (), {"COMM_WORLD": 0})}))
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_RANK": "1", "OMP_NUM_THREADS": "1"})
    line = refused(lambda: connect.connect(fusion_threshold_mb=None, cycle_time_ms=None))
    assert line.startswith(f"{sys.executable}: Horovod is not installed")
    assert f"{sys.executable} -m pip install dist/horovod-*.whl" in line
