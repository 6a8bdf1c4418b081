import sys
from unittest.mock import Mock

import pytest

from hvdtrain.ranks import connect, launchers
from hvdtrain.ranks.comm import SerialComm
from tests.refusals import refused, require_facts

TORCHRUN = {"TORCHELASTIC_RUN_ID": "none", "WORLD_SIZE": "2", "RANK": "0"}
SRUN = {
    "SLURM_STEP_NUM_TASKS": "8",
    "SLURM_STEP_TASKS_PER_NODE": "3(x2),2",
    "SLURM_PROCID": "0",
    "SLURM_GTIDS": "0,1,2",
    "SLURM_NTASKS": "8",
}


def alone(monkeypatch, environment):
    monkeypatch.setattr(connect.os, "environ", {"OMP_NUM_THREADS": "1", **environment})
    return connect.connect(fusion_threshold_mb=None, cycle_time_ms=None)


@pytest.mark.parametrize(
    ("environment", "launcher", "count"),
    [
        (TORCHRUN, "torchrun", 2),
        (SRUN, "srun", 8),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "0"}, "srun", 8),  # all that a container lets through
        ({**SRUN, **TORCHRUN}, "torchrun", 2),
    ],
)
def test_processes_that_do_not_meet_are_refused_with_the_right_command(monkeypatch, environment, launcher, count):
    single = "mpirun -np 1" if launcher == "srun" else "torchrun --nproc-per-node 1"
    facts = f"{launcher} ... {count} ... mpirun -np {count} ... hvdlaunch run -np {count} ... {single}"
    require_facts(refused(lambda: alone(monkeypatch, environment)), facts)


def test_hvdlaunch_sets_the_variables_of_torchrun_and_is_not_taken_for_it(monkeypatch):
    assert isinstance(alone(monkeypatch, {**TORCHRUN, "HVDLAUNCH_PLAN": "of hvdlaunch"}), SerialComm)


def test_the_others_leave_the_line_to_the_first_one_and_time_for_it(monkeypatch):
    slept = []
    monkeypatch.setattr(launchers, "time", Mock(sleep=slept.append))
    with pytest.raises(SystemExit) as left:
        alone(monkeypatch, {**SRUN, "SLURM_PROCID": "7", "SLURM_GTIDS": "6,7"})
    assert (left.value.code, slept) == (2, [launchers.FIRST_ERROR_S])


@pytest.mark.parametrize(
    "environment",
    [
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1", "SLURM_PROCID": "0"},  # sbatch -n 8, and one process in the script
        {**SRUN, "SLURM_GTIDS": "0"},  # a batch script that was submitted within such a step
        {**TORCHRUN, "WORLD_SIZE": "1"},
        {"WORLD_SIZE": "2", "RANK": "1"},  # of something else
    ],
)
def test_one_process_may_be_alone(monkeypatch, environment):
    assert isinstance(alone(monkeypatch, environment), SerialComm)


@pytest.mark.parametrize(
    ("size", "environment", "refuses"),
    [
        (1, {**SRUN, "PMI_RANK": "0"}, True),  # Slurm offers PMI, and this MPI does not take it
        (2, {**SRUN, "PMI_RANK": "0"}, False),
        (1, {**SRUN, "OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, False),  # the tasks are its daemons
    ],
)
def test_what_mpi_says_counts(monkeypatch, size, environment, refuses):
    monkeypatch.setattr(connect, "HorovodComm", lambda _: type("Joined", (SerialComm,), {"size": size})())
    monkeypatch.setitem(sys.modules, "mpi4py", type("mpi4py", (), {"MPI": type("MPI", (), {"COMM_WORLD": 0})}))
    if refuses:
        require_facts(refused(lambda: alone(monkeypatch, environment)), "srun ... 8 ... mpirun -np 8")
    else:
        assert alone(monkeypatch, environment).size == size
