import socket
from unittest.mock import Mock

import pytest

from hvdtrain.settings.safety import exits, limits
from tests.refusals import require_facts
from tests.unit.settings.safety.test_limits import group

MPIRUN = {"OMPI_COMM_WORLD_LOCAL_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3"}


@pytest.mark.parametrize(
    ("environment", "local"),
    [
        ({}, (0, 1)),
        (MPIRUN, (3, 8)),
        ({"MPI_LOCALNRANKS": "6", "MPI_LOCALRANKID": "5", "PMI_RANK": "11"}, (5, 6)),
        ({"SLURM_GTIDS": "6,7,8", "SLURM_LOCALID": "2"}, (2, 3)),
        ({**MPIRUN, "SLURM_GTIDS": "0", "SLURM_LOCALID": "0"}, (3, 8)),  # the tasks of the step are mpirun's daemons
        ({"SLURM_NTASKS": "8", "SLURM_GTIDS": "0", "SLURM_LOCALID": "0"}, (0, 1)),  # a batch script
    ],
)
def test_each_launcher_says_how_many_it_has_started_on_a_host(environment, local):
    assert limits.local_ranks(environment) == local


def ranks_on_a_small_host(tmp_path, ranks, local_rank=0, *, memory=1_600_000_000):
    root = group(tmp_path / str(local_rank), "0::/\n", **{"memory.max": str(memory)})
    environment = {"OMPI_COMM_WORLD_LOCAL_SIZE": str(ranks), "OMPI_COMM_WORLD_LOCAL_RANK": str(local_rank)}
    limits.require_room(environment, root)


def test_ranks_that_do_not_fit_their_host_leave_and_its_first_one_says_why(capsys, monkeypatch, tmp_path):
    slept, reports = [], []
    monkeypatch.setattr(limits, "time", Mock(sleep=slept.append))
    monkeypatch.setattr(exits, "report", lambda **facts: reports.append(facts["said"]))
    statuses = []
    for local_rank in range(5):
        with pytest.raises(SystemExit) as left:
            ranks_on_a_small_host(tmp_path, 5, local_rank)
        statuses.append(left.value.code)
    assert statuses == [2] * 5
    [line] = capsys.readouterr().err.splitlines()
    require_facts(line, f"hvdtrain: error: {socket.gethostname()}: 5 ranks ... 1.8 GB ... 1.6 GB ... at most 4 ranks")
    assert reports == [line]
    assert slept == [exits.FIRST_ERROR_S] * 4  # its launcher ends all once one has left


@pytest.mark.parametrize(("ranks", "memory"), [(4, 1_400_000_000), (1, 1)])
def test_ranks_that_fit_go_on_and_so_does_one_alone(capsys, tmp_path, ranks, memory):
    ranks_on_a_small_host(tmp_path, ranks, memory=memory)
    assert capsys.readouterr() == ("", "")


def test_where_the_memory_is_not_known_any_number_goes_on(tmp_path):
    limits.require_room(MPIRUN, tmp_path)
