from unittest.mock import Mock

import pytest

from launch.errors import ProcessError
from launch.hosts import srun
from launch.process import Answer


def test_a_step_is_of_the_job_and_not_of_the_step_or_script_that_asks_for_it():
    of_step = ("SLURM_GPUS_PER_TASK", "SLURM_STEP_ID", "SLURMD_NODENAME", "SRUN_CPUS_PER_TASK", "SSH_CONNECTION")
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "LD_LIBRARY_PATH": "/opt/lib"}
    given = {**kept, **dict.fromkeys(of_step, "1"), "CUDA_VISIBLE_DEVICES": "3"}
    assert srun.step_environment(given) == kept
    assert given["CUDA_VISIBLE_DEVICES"] == "3"


def test_it_becomes_one_task_on_that_node_with_the_command_for_a_shell_there(monkeypatch):
    became = []
    monkeypatch.delenv("SLURM_JOB_NODELIST", raising=False)
    monkeypatch.setattr(srun.os, "execvpe", lambda *words: became.append(words))
    srun.main("n2", "cd '/my runs' &&", "exec true")
    ((program, words, _),) = became
    assert not [word for word in words if "gres" in word]
    assert (program, words[0]) == ("srun", "srun")
    assert {"--overlap", "--nodes=1", "--ntasks=1", "--cpu-bind=none", "--nodelist=n2"} < set(words)
    assert words[-3:] == ["sh", "-c", "cd '/my runs' && exec true"]
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    monkeypatch.setenv("SLURM_GPUS_PER_NODE", "8")
    srun.main("n2", "true")
    assert "--gres=gpu:8" in became[1][1]


@pytest.mark.parametrize(
    ("variables", "gres"),
    [
        ({"GPUS_ON_NODE": "4"}, []),  # those of the batch host
        ({"GPUS_ON_NODE": "4", "GPUS": "8"}, ["--gres=gpu:4"]),
        ({"GPUS_ON_NODE": "2", "GPUS_PER_TASK": "1", "TASKS_PER_NODE": "2,1"}, ["--gres=gpu:1"]),
        ({"GPUS_PER_NODE": "0"}, []),
        ({"GPUS_PER_NODE": "4", "JOB_NODELIST": "n1"}, []),  # srun says that it is another's
        ({"GPUS_PER_NODE": "4", "JOB_NODELIST": ""}, []),
    ],
)
def test_a_step_asks_for_the_gpus_of_its_own_node(variables, gres):
    given = {"JOB_NODELIST": "n[1-2]", "TASKS_PER_NODE": "2(x2)", **variables}
    assert srun.gres("n2", {f"SLURM_{name}": value for name, value in given.items()}) == gres


DETAILS = """\
JobId=7 JobName=train
   NumNodes=3 NumCPUs=96 NumTasks=3 TRES=cpu=96,gres/gpu=10
   JOB_GRES=gpu:a100:10
     Nodes=n[1,3] CPU_IDs=0-31 Mem=0 GRES=gpu:a100:4(IDX:0,2,4-5),nic:1(IDX:0)
     Nodes=n2 CPU_IDs=0-31 Mem=0 GRES=gpu:a100:2(IDX:0-1)
     Nodes=n4 CPU_IDs=0-31 Mem=0 GRES=
"""


@pytest.mark.parametrize(
    ("node", "gres"), [("n1", ["--gres=gpu:4"]), ("n2", ["--gres=gpu:2"]), ("n4", []), ("other", [])]
)
def test_gpus_that_are_requested_for_the_whole_job_are_counted_by_slurm(monkeypatch, node, gres):
    asked = []
    monkeypatch.setattr(srun, "ask", lambda argv, **_: asked.append(argv) or Answer(status=0, out=DETAILS, err=""))
    uneven = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_GPUS_ON_NODE": "4", "SLURM_GPUS": "10"}
    assert srun.gres(node, uneven) == gres
    assert asked == [["scontrol", "--details", "show", "job", "7"]]


def test_without_an_answer_of_slurm_srun_decides(monkeypatch):
    monkeypatch.setattr(srun, "ask", Mock(side_effect=ProcessError("no scontrol")))
    assert srun.gres("n1", {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_GPUS": "6"}) == []
