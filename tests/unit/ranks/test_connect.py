import os
import sys
from pathlib import Path

import pytest

from hvdtrain.ranks import connect
from hvdtrain.ranks.comm import SerialComm
from hvdtrain.settings.safety.exits import RANK_VARIABLES
from hvdtrain.settings.safety.watchdog import WAIT_MARGIN_S, slow_limit_s
from tests.refusals import refused

FUSION, CYCLE, STALL = "HOROVOD_FUSION_THRESHOLD", "HOROVOD_CYCLE_TIME", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"


def alone(**options):
    return connect.connect(**{"fusion_threshold_mb": None, "cycle_time_ms": None, **options})


@pytest.mark.parametrize(
    ("environment", "options", "variable", "expected"),
    [
        ({}, {}, FUSION, str(128 * 2**20)),
        ({}, {"fusion_threshold_mb": 0.0}, FUSION, "0"),
        ({FUSION: "999"}, {}, FUSION, "999"),
        ({FUSION: "999"}, {"fusion_threshold_mb": 64.0}, FUSION, str(64 * 2**20)),
        ({}, {}, CYCLE, None),
        ({CYCLE: "7"}, {"cycle_time_ms": 2.5}, CYCLE, "2.5"),
        ({}, {}, "HOROVOD_CACHE_CAPACITY", "4096"),
        ({"HOROVOD_CACHE_CAPACITY": "0"}, {}, "HOROVOD_CACHE_CAPACITY", "0"),
        ({}, {}, STALL, "660"),
        ({STALL: "7"}, {"hang_timeout_s": 120.0}, STALL, "7"),
    ],
)
def test_an_option_comes_before_the_environment_before_the_default(
    monkeypatch, environment, options, variable, expected
):
    monkeypatch.setattr(os, "environ", environment := dict(environment))
    assert isinstance(alone(**options), SerialComm)
    assert environment.get(variable) == expected


@pytest.mark.parametrize("hang_timeout_s", [None, 0.0, 120.0])
def test_horovod_ends_a_stalled_job_later_than_any_watchdog(monkeypatch, hang_timeout_s):
    monkeypatch.setattr(os, "environ", environment := {})
    alone(hang_timeout_s=hang_timeout_s)
    assert float(environment[STALL]) > slow_limit_s(hang_timeout_s) + WAIT_MARGIN_S


@pytest.mark.parametrize("variable", RANK_VARIABLES)
def test_a_launched_rank_is_not_taken_for_a_single_process(monkeypatch, variable):
    monkeypatch.setattr(os, "environ", {variable: "0"})
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError):
        alone()


@pytest.mark.parametrize(("ranks", "yields"), [("4", "1"), ("3", None)])
def test_ranks_that_fill_their_cores_yield_while_they_wait(monkeypatch, ranks, yields):
    environment = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": ranks}
    monkeypatch.setattr(os, "environ", environment)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(4)))
    monkeypatch.setattr("hvdtrain.ranks.cores.ROOT", Path("/nowhere"))
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(ImportError):  # at the import, which would start MPI, it must be set already
        alone()
    assert environment.get("OMPI_MCA_mpi_yield_when_idle") == yields


def test_ranks_that_lack_horovod_are_told_how_to_get_it(monkeypatch):
    monkeypatch.setattr(connect, "HorovodComm", lambda _: SerialComm())
    monkeypatch.setattr(connect, "find_spec", lambda _: None)
    monkeypatch.setitem(sys.modules, "mpi4py", type("mpi4py", (), {"MPI": type("MPI", (), {"COMM_WORLD": 0})}))
    monkeypatch.setattr(os, "environ", {"OMPI_COMM_WORLD_RANK": "1", "OMP_NUM_THREADS": "1"})
    line = refused(alone)
    assert line.startswith(f"{sys.executable}: Horovod is not installed")
    assert f"{sys.executable} -m pip install dist/*.whl" in line
