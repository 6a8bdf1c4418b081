import json
import shlex

import pytest

from launch.errors import CommandError
from launch.run.start.mpijob import START, mpijob, parse_options, plain_name, secrets, workers
from tests.unit.machines import refusal_of

TRAIN = ("hvdlaunch", "run", "-np", "16", "--", "python", "-m", "hvdtrain.effnet", "--name", "$HOME $(x) $$")


def job(**changes):
    options = parse_options(["image=ghcr.io/me/hvdtrain:1", "claim=runs"], 4)
    plain = {"name": "effnet", "options": options, "workers": workers(16, 8)}
    more = {"gpus": True, "grace_s": 25.5, "restarts": False, "exports": (), "environment": {}}
    return mpijob(TRAIN, **{**plain, **more, **changes})


GIVEN = {"MY_DATA": "/shared/$data", "WANDB_API_KEY": "canary", "HVDLAUNCH_JOB": "mine", "PATH": "/bin"}
GPUS = job(restarts=True, exports=("MY_DATA", "WANDB_API_KEY"), environment=GIVEN)
FEW = {"image": "hvdtrain", "claim": "nfs.runs", "cpu": "1", "memory": "3000M"}
CPUS = job(gpus=False, options=FEW, workers=workers(4, None))


def spec(text):
    return json.loads(text)["spec"]


def pod(text, replica):
    return spec(text)["mpiReplicaSpecs"][replica]["template"]["spec"]


def container(text, replica):
    (found,) = pod(text, replica)["containers"]
    return found


def test_its_fields_are_those_of_an_mpijob_of_kubeflow():
    """As in pkg/apis/kubeflow/v2beta1/types.go of kubeflow/mpi-operator."""
    job = json.loads(GPUS)
    assert (job["apiVersion"], job["kind"], job["metadata"]) == ("kubeflow.org/v2beta1", "MPIJob", {"name": "effnet"})
    replicas = job["spec"].pop("mpiReplicaSpecs")
    assert job["spec"] == {
        "slotsPerWorker": 8,
        "launcherCreationPolicy": "WaitForWorkersReady",
        "sshAuthMountPath": "/home/hvdtrain/.ssh",
        "runPolicy": {"cleanPodPolicy": "Running", "backoffLimit": 1},  # a lost launcher is started again
    }
    counts = {name: (replica["replicas"], replica["restartPolicy"]) for name, replica in replicas.items()}
    assert counts == {"Launcher": (1, "Never"), "Worker": (2, "OnFailure")}
    assert spec(CPUS)["runPolicy"]["backoffLimit"] == 0


def test_the_launcher_gets_the_very_words():
    words = container(GPUS, "Launcher")["args"]
    assert tuple(word.replace("$$", "$") for word in words) == (*START, *TRAIN)  # as Kubernetes does it
    assert words[-1] == "$$HOME $$(x) $$$$"
    assert shlex.split(START[2])[-1] == "$@"


def test_each_pod_has_what_its_ranks_need():
    """As in core/v1 of Kubernetes."""
    requests = {"cpu": "32", "memory": "32Gi"}  # of eight ranks
    worker = container(GPUS, "Worker")
    assert worker["resources"] == {"requests": requests, "limits": {"nvidia.com/gpu": 8}}
    assert container(CPUS, "Worker")["resources"] == {"requests": {"cpu": "4", "memory": "12000M"}}
    assert (worker["args"], worker["env"]) == (["sshd"], [{"name": "SSH_PORT", "value": "2222"}])
    assert worker["readinessProbe"] == {"tcpSocket": {"port": 2222}, "periodSeconds": 1}
    assert worker["volumeMounts"] == [
        {"name": "shared", "mountPath": "/shared"},
        {"name": "memory", "mountPath": "/dev/shm"},  # noqa: S108
    ]
    assert pod(GPUS, "Worker")["volumes"] == [
        {"name": "shared", "persistentVolumeClaim": {"claimName": "runs"}},
        {"name": "memory", "emptyDir": {"medium": "Memory"}},
    ]
    for replica in ("Launcher", "Worker"):
        assert container(GPUS, replica)["workingDir"] == "/shared"
        assert pod(GPUS, replica)["terminationGracePeriodSeconds"] == 26 + 10
        assert pod(GPUS, replica)["securityContext"] == {"runAsUser": 1000, "fsGroup": 1000}


def test_a_secret_is_named_and_not_written():
    assert "canary" not in GPUS
    assert container(GPUS, "Launcher")["env"] == [
        {"name": "HVDLAUNCH_JOB", "value": "mine"},
        {"name": "MY_DATA", "value": "/shared/$$data"},
        {"name": "WANDB_API_KEY", "valueFrom": {"secretKeyRef": {"name": "effnet", "key": "WANDB_API_KEY"}}},
    ]
    assert secrets(("A", "MY_TOKEN"), {"A": "1", "MY_TOKEN": "2"}) == ("MY_TOKEN",)


@pytest.mark.parametrize(
    ("given", "line"),
    [
        (["image=a", "workers=2"], "--batch-option 'workers=2': unknown. Write image=IMAGE or claim=NAME"),
        (["image=\x1b[2J"], r"--batch-option 'image=\x1b[2J': not supported. Write a value such as image=IMAGE."),
        (["claim=B_c"], "--batch-option 'claim=B_c': not supported. Write a value such as claim=NAME."),
        (["cpu=0"], "--batch-option 'cpu=0': not supported. Write a value such as cpu=8."),
        (["memory=4GB"], "--batch-option 'memory=4GB': not supported. Write a value such as memory=16Gi."),
    ],
)
def test_what_is_wrong_is_one_line(given, line):
    assert refusal_of(CommandError, lambda: parse_options(given, 4)).startswith(line)


def test_each_worker_has_as_many_ranks():
    assert [(host.name, host.slots) for host in workers(8, 2)] == [(f"worker-{number}", 2) for number in range(4)]
    assert [host.slots for host in workers(8, None)] == [8]
    with pytest.raises(CommandError, match="--per-host 4: -np 6 is not a multiple of it"):
        workers(6, 4)


NAMES = {"My_Run.1": "my-run-1", "20261122-10": "job-20261122-10", "...": "job", "a" * 60: "a" * 40}


def test_a_name_that_kubernetes_takes_with_a_stamp_that_keeps_jobs_apart_however_long_it_is():
    for name, plain in (*NAMES.items(), (f"train{'-' * 35}x", "train-x")):
        assert plain_name(name) == plain
    assert plain_name("x." * 40, stamp="20260102-030405-ab12") == f"{'x-' * 9}x-20260102-030405-ab12"
