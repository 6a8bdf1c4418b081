"""hvdlaunch under Slurm: a controller and a node on loopback, with munge, made by the test and gone with it."""

import contextlib
import getpass
import json
import os
import shlex
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mpi.conftest import EFFNET, PROGRAMS, PROJECT, QUICK, TIMEOUT_S, left_in, wait_until
from tests.mpi.launched import ON_CPUS, PLACE, argv, environment, finished, lines, ranks, running, signals
from tests.refusals import require_facts

PATH = f"{os.environ['PATH']}:/usr/sbin:/sbin"
NEEDED = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scancel", "sinfo")
MISSING = [program for program in NEEDED if shutil.which(program, path=PATH) is None]
pytestmark = pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}")

NODE = socket.gethostname().partition(".")[0]
CONF = """\
ClusterName=test
SlurmctldHost={node}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmdPort={ports[1]}
SlurmUser={user}
SlurmdUser={user}
AuthInfo=socket={folder}/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
GresTypes=gpu
NodeName={node} NodeAddr=127.0.0.1 CPUs=2 RealMemory=1000 Gres=gpu:8 State=UNKNOWN
"""
ANYWHERE = """\
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
ReturnToService=2
PartitionName=all Nodes=ALL Default=YES State=UP
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory):
    """What a user needs in the environment to submit jobs."""
    folder = tmp_path_factory.mktemp("slurm")
    for name in ("state", "spool"):
        (folder / name).mkdir()
    (folder / "key").write_bytes(os.urandom(128))
    (folder / "key").chmod(0o600)
    with socket.socket() as one, socket.socket() as two:
        for bound in (one, two):
            bound.bind(("127.0.0.1", 0))
        ports = [bound.getsockname()[1] for bound in (one, two)]
    conf = folder / "slurm.conf"
    for number in range(8):  # GPUs by name alone
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    conf.write_text(CONF.format(node=NODE, ports=ports, user=getpass.getuser(), folder=folder) + ANYWHERE)
    settings = {"SLURM_CONF": str(conf), "PATH": PATH}
    files = {"key-file": "key", "socket": "munge", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}
    munged = ["munged", "--foreground", "--force", *(f"--{name}={folder / file}" for name, file in files.items())]
    ready = {
        tuple(munged): (folder / "munge").exists,
        ("slurmctld", "-D"): lambda: ask("scontrol", "ping").returncode == 0,
        ("slurmd", "-D"): lambda: ask("sinfo", "--noheader", "--format=%T").stdout.strip() == "idle",
    }

    def ask(*words):
        return subprocess.run(words, env={**os.environ, **settings}, capture_output=True, text=True, check=False)

    with contextlib.ExitStack() as stack:
        for words, is_ready in ready.items():
            log = stack.enter_context((folder / f"{words[0]}.out").open("w"))
            daemon = subprocess.Popen(words, cwd=folder, env={**os.environ, **settings}, stdout=log, stderr=log)
            stack.callback(daemon.wait, timeout=30)
            stack.callback(daemon.terminate)
            wait_until(is_ready, 20)
        yield settings


def path(slurm):
    return {**slurm, "PATH": f"{environment(Path())['PATH']}:{slurm['PATH']}"}


def slurms(folder, slurm, *words):
    """What a command of Slurm says; a job that it has submitted runs on."""
    done = subprocess.run(
        words, cwd=folder, env=environment(folder, **path(slurm)), capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def submitted(folder, slurm, program, *words):
    """The number of a job, by a script that hvdlaunch has written."""
    done = finished(folder, argv("--batch", "job.sbatch", *words, program=program), **path(slurm))
    assert done.returncode == 0, done.stderr
    assert done.stdout == "submit it with: sbatch job.sbatch\n"
    return slurms(folder, slurm, "sbatch", "--parsable", "job.sbatch")


def status_of(folder, slurm, job):
    """The exit status of a job that has ended, and what it has written."""

    def ended():
        facts = dict(word.partition("=")[::2] for word in slurms(folder, slurm, "scontrol", "show", "job", job).split())
        return facts["JobState"] in ("COMPLETED", "FAILED") and facts["ExitCode"]

    status = wait_until(ended, TIMEOUT_S)
    (file,) = folder.glob(f"*-{job}.out")
    return status, [line for line in file.read_text().splitlines() if line != ON_CPUS]


def test_slurm_takes_the_options_of_a_script(tmp_path, slurm):
    options = {"time": "7", "partition": "all", "comment": "a 'b' & c", "cpus-per-task": "1", "mem": "50M"}
    words = [word for key, value in options.items() for word in ("--batch-option", f"{key}={value}")]
    job = submitted(tmp_path, slurm, PLACE, *words, "--batch-option", "exclusive")
    shown = slurms(tmp_path, slurm, "scontrol", "show", "job", job)
    wanted = ("JobName=place", "TimeLimit=00:07:00", "Partition=all", "Comment=a 'b' & c", "CPUs/Task=1", "50M")
    assert [word for word in (*wanted, "OverSubscribe=NO") if word not in shown] == [], shown
    assert status_of(tmp_path, slurm, job) == ("0:0", [])


def test_a_batch_script_runs_on_the_nodes_of_its_allocation_and_needs_no_activated_shell(tmp_path, slurm):
    done = finished(tmp_path, argv("--batch", "job.sbatch", program=["python", *PLACE[1:]]), **path(slurm))
    assert done.returncode == 0, done.stderr
    bare = {"SLURM_CONF": slurm["SLURM_CONF"], "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    submit = ["sbatch", "--parsable", "job.sbatch"]
    done = subprocess.run(submit, cwd=tmp_path, env=bare, capture_output=True, text=True, check=True)
    assert status_of(tmp_path, slurm, done.stdout.strip()) == ("0:0", [])
    places = ranks(tmp_path)
    assert [(one["rank"], one["local_rank"], one["planned_on"]) for one in places] == [(0, 0, NODE), (1, 1, NODE)]
    assert [one["blocked"] for one in places] == [[]] * 2


def test_ranks_of_a_job_that_slurm_cancels_are_ended(tmp_path, slurm):
    job = submitted(tmp_path, slurm, [*PLACE, "--stay"])
    running(tmp_path)
    slurms(tmp_path, slurm, "scancel", job)
    wait_until(lambda: not left_in(tmp_path), 10)
    assert signals(tmp_path) == [["SIGTERM"]] * 2


def test_a_job_that_slurm_warns_saves_and_goes_on_when_it_is_submitted_again(tmp_path, slurm):
    steps = [sys.executable, str(PROGRAMS / "steps.py"), ".", "--until", "enough"]
    job = submitted(tmp_path, slurm, steps)

    def saved():
        return max((int(file.read_text()) for file in tmp_path.glob("*/checkpoint")), default=0)

    wait_until(saved, TIMEOUT_S)
    slurms(tmp_path, slurm, "scancel", "--batch", "--signal=USR1", job)
    status, said = status_of(tmp_path, slurm, job)
    step = saved()
    name = f"steps-{job}"
    assert (status, len(said)) == ("0:0", 1)
    assert said[0].startswith(f"hvdlaunch: note: stopped and saved at step {step}.")
    assert f"HVDLAUNCH_JOB={name}" in said[0]
    (tmp_path / "enough").touch()
    slurms(tmp_path, slurm, "sbatch", f"--export=ALL,HVDLAUNCH_JOB={name}", "job.sbatch")
    attempts = tmp_path / name / "attempts.jsonl"
    wait_until(lambda: len(attempts.read_text().splitlines()) == 2, TIMEOUT_S)
    assert json.loads(attempts.read_text().splitlines()[1])["from"] == step
    wait_until(lambda: not left_in(tmp_path), 20)


@pytest.fixture
def by_srun(slurm, tmp_path):
    """hvdlaunch run --launcher srun, with these words, in an allocation of its own."""

    def start(*words, program):
        allocate = ["salloc", "--quiet", "--ntasks=2"]
        return finished(tmp_path, [*allocate, *argv("--launcher", "srun", *words, program=program)], **path(slurm))

    step = ["srun", "--ntasks=1", "--mpi=pmix", "true"]
    done = subprocess.run(step, env={**os.environ, **slurm}, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this Slurm has no PMIx: {done.stderr.strip()}")
    return start


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ([], 0, []),
        (["--end", "1", "3"], 3, ["ended with status 3"]),
        (["--end", "1", "SIGKILL"], 137, ["died of signal 9 (Killed), perhaps out of memory"]),
    ],
)
def test_srun_starts_the_ranks_where_the_plan_says_and_the_first_that_fails_is_named(
    tmp_path, by_srun, end, status, said
):
    done = by_srun(program=[*PLACE, *end])
    assert done.returncode == status, done.stderr
    assert lines(done) == [f"hvdlaunch: error: rank 1 on {NODE} {how}" for how in said]
    places = [(one["rank"], one["local_rank"], one["death_signal"]) for one in ranks(tmp_path)]
    assert places == [(0, 0, signal.SIGKILL), (1, 1, signal.SIGKILL)]


def test_a_step_has_all_gpus_of_its_job_on_the_node(tmp_path, slurm):
    """Also where the job has one for each task, and a step of one task would get one."""
    step = [sys.executable, "-P", "-m", "launch.hosts.srun", NODE, "echo $SLURM_GPUS_ON_NODE"]
    (tmp_path / "job.sh").write_text(f"#!/bin/bash\n{shlex.join(step)}\n")
    words = ("--ntasks=2", "--gpus-per-task=1", "--output=step-%j.out", "job.sh")
    job = slurms(tmp_path, {**slurm, **ALONE}, "sbatch", "--parsable", *words)
    status, said = status_of(tmp_path, slurm, job)
    assert (status, said[-1]) == ("0:0", "2"), said


ALONE = {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}


def test_sruns_ranks_that_do_not_meet_are_refused_and_train_nothing(tmp_path, slurm):
    train = [sys.executable, *EFFNET, *QUICK, "--run", "r"]
    done = finished(tmp_path, ["srun", "--ntasks=2", "--mpi=none", *train], **path(slurm), **ALONE)
    said = [line for line in done.stderr.splitlines() if line.startswith("hvdtrain: ")]
    assert done.returncode == 2
    assert len(said) == 1
    require_facts(said[0], "hvdtrain: error: srun ... 2 independent processes ... mpirun -np 2, ")
    assert not (tmp_path / "runs").exists()
