"""--batch FILE.yaml, and the hostfile that a launcher pod has."""

import json
import os
from pathlib import Path

import pytest

from launch.cli import start
from launch.cli.options import parser
from launch.hosts.host import Host
from launch.machine import mpi
from tests.unit.cli.commands import output

PROGRAM = ("--", "prog")
ASKED = ("--batch", "job.json", "--batch-option", "image=me/hvdtrain", "--batch-option=claim=runs")
JOB = ("run", "-np", "4", *ASKED)


@pytest.fixture(autouse=True)
def stamp(monkeypatch):
    monkeypatch.setattr(start.prepare, "job_of", lambda _: "20260102-030405-ab12")


def launcher_of(file):
    replicas = json.loads(Path(file).read_text())["spec"]["mpiReplicaSpecs"]
    (container,) = replicas["Launcher"]["template"]["spec"]["containers"]
    return container


def test_mpijob_writes_a_job_that_runs_the_same_again(capsys):
    words = ["--per-host", "2", "--restarts", "3", "--show", "all", "-x", "NCCL_DEBUG"]
    train = ["--", "python", "-m", "hvdtrain.effnet", "--batch", "x"]
    said = output(capsys, *JOB, *words, *train)
    assert said == "submit it with: kubectl create -f job.json\n"
    job = json.loads(Path("job.json").read_text())
    assert job["metadata"]["name"] == "hvdtrain-effnet-20260102-030405-ab12"
    assert launcher_of("job.json")["env"][0]["value"] == job["metadata"]["name"]  # the run's, and so its folder's
    assert (job["spec"]["slotsPerWorker"], job["spec"]["runPolicy"]["backoffLimit"]) == (2, 1)
    args = launcher_of("job.json")["args"]
    run = args[args.index("hvdlaunch") :]
    before, program = run[: run.index("--")], run[run.index("--") :]
    assert (before[:12], program) == (["hvdlaunch", "run", "-np", "4", *words], train)
    assert "--batch" not in before
    assert "StrictHostKeyChecking=no" in before
    parser().parse_args(before[1:])


def test_a_job_that_the_user_names_keeps_its_name(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "HVDLAUNCH_JOB", "Mine.2")
    output(capsys, *JOB, *PROGRAM)
    assert json.loads(Path("job.json").read_text())["metadata"]["name"] == "mine-2"
    assert launcher_of("job.json")["env"][0]["value"] == "Mine.2"


def test_a_secret_that_ranks_are_to_get_is_made_first(capsys):
    said = output(capsys, *JOB, "-x", "MY_TOKEN", *PROGRAM)
    kubectl = "kubectl create secret generic prog-20260102-030405-ab12 --from-env-file=/dev/stdin"
    assert said.startswith(f"first: env | grep -E '^(MY_TOKEN)=' | {kubectl}\n")
    assert "s3cret!" not in Path("job.json").read_text()


def hosts_of(*words):
    return start._hosts(parser().parse_args(["run", "-np", "1", *words]), mpi.from_environment(os.environ))


def test_in_a_launcher_pod_its_hostfile_is_the_default(monkeypatch, folder):
    (folder / "hostfile").write_text("pi-worker-0.svc slots=8\npi-worker-1.svc slots=8\n")
    assert hosts_of() is None
    monkeypatch.setitem(os.environ, "OMPI_MCA_orte_default_hostfile", str(folder / "hostfile"))
    assert hosts_of() == tuple(Host(name=f"pi-worker-{number}.svc", slots=8) for number in (0, 1))
    assert hosts_of("-H", "a:2") == (Host(name="a", slots=2),)
    assert hosts_of("--hostfile", "hosts") == (Host(name="a", slots=2), Host(name="b", slots=1))
    monkeypatch.setitem(os.environ, "SLURM_JOB_NODELIST", "n1")
    assert hosts_of() is None
    monkeypatch.setitem(os.environ, "SLURM_JOB_NODELIST", "n[")
    assert hosts_of("-H", "a:2") == (Host(name="a", slots=2),)
    monkeypatch.setitem(os.environ, "SLURM_JOB_NODELIST", "")
    assert len(hosts_of()) == 2
    monkeypatch.delitem(os.environ, "SLURM_JOB_NODELIST")
    monkeypatch.setitem(os.environ, "OMPI_MCA_orte_default_hostfile", "")
    assert hosts_of() is None
