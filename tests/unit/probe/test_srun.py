import pytest

from launch.probe import srun


def test_a_step_is_of_the_job_and_not_of_the_step_or_script_that_asks_for_it():
    given = {
        "SLURM_JOB_ID": "7",
        "SLURM_CONF": "/etc/slurm.conf",
        "SLURM_GPUS_PER_TASK": "1",
        "SLURM_STEP_ID": "0",
        "SLURMD_NODENAME": "n1",
        "SRUN_CPUS_PER_TASK": "1",
        "CUDA_VISIBLE_DEVICES": "3",
        "SSH_CONNECTION": "10.0.0.1 5000 10.0.0.2 22",
        "LD_LIBRARY_PATH": "/opt/lib",
    }
    kept = {"SLURM_JOB_ID": "7", "SLURM_CONF": "/etc/slurm.conf", "LD_LIBRARY_PATH": "/opt/lib"}
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
