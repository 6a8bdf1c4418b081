"""Pure: a command -> the MPIJob of Kubeflow that starts it, with checks before it is submitted.

The job is JSON, which Kubernetes accepts like YAML. Its fields are defined in pkg/apis/kubeflow/v2beta1/types.go of
kubeflow/mpi-operator, and in core/v1 of Kubernetes. The operator adds keys, a hostfile and variables of Open MPI:
pkg/controller/mpi_job_controller.go of the same repository.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from launch.errors import CommandError
from launch.hosts.host import Host, shown
from launch.run.start.environment import is_secret

SUFFIXES = (".yaml", ".yml", ".json")
CLEAN_UP_S = 10  # to end all ranks that have not saved in time
# Restarts after a failure of the launcher's node; the command itself restarts failed ranks. Kubernetes cannot
# distinguish the two, and each additional restart would repeat all restarts of the command, even after a final status.
LOST_LAUNCHERS = 1
NAME_CHARS = 40  # the longer name of a pod is limited to 63
# From the project's image: its user (the group has the same number), that user's home, and the port of the ssh server,
# since the user cannot bind a port below 1024. An image built FROM it may run as root, whose home has no keys.
USER, KEYS, PORT = 1000, "/home/hvdtrain/.ssh", 2222
SHARED = "/shared"  # mount point of the claim in every pod, and working folder
SSH = (f"Port={PORT}", "StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "ConnectionAttempts=10")
# DNS takes a few seconds to resolve new pods. The operator's arguments for ssh would override ours.
WAIT = "for second in $(seq 60); do getent hosts $(cut -d' ' -f1 /etc/mpi/hostfile) >/dev/null && break; sleep 1; done"
START = ("sh", "-c", f'{WAIT}; unset OMPI_MCA_plm_rsh_args; exec "$@"', "sh")


# For --batch-option: values that Kubernetes accepts, and proposals for missing or wrong ones.
PLAIN = {
    "image": r"\w[\w./:@-]*",
    "claim": r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?",
    "cpu": r"0*[1-9][0-9]{0,3}",
    "memory": r"0*[1-9][0-9]{0,6}[MGT]i?",
}
EXAMPLES = {"image": "image=IMAGE", "claim": "claim=NAME", "cpu": "cpu=8", "memory": "memory=16Gi"}
NEEDED = {"image": "the image to run", "claim": "a PersistentVolumeClaim that all pods can write to"}
MEMORY = "4Gi"  # of a rank: its own, and the host memory of its GPU's driver
OF_LAUNCHER = {"cpu": "1", "memory": "1Gi"}  # for hvdlaunch and mpirun
Options = Mapping[str, str]  # --batch-option; cpu and memory are of a rank, in Kubernetes notation


def mpijob(
    command: Sequence[str],
    *,
    name: str,
    options: Options,
    workers: Sequence[Host],
    gpus: bool,
    grace_s: float,
    restarts: bool,
    exports: Sequence[str],
    environment: Mapping[str, str],
) -> str:
    """Return an MPIJob with complete options whose launcher starts `command`, which finds the workers by itself.

    The command gets `grace_s` and a few more seconds to save before it is killed. With `restarts` a lost launcher is
    restarted; the run keeps its name, and so its run folder. Variables in `exports` that look like a secret come from
    the Secret with the name of the job.
    """
    slots, secret = workers[0].slots, secrets(exports, environment)
    variables: list[dict[str, Any]] = [
        {"name": "HVDLAUNCH_JOB", "value": _literal(environment.get("HVDLAUNCH_JOB") or name)}
    ]
    for export in exports:
        key = {"valueFrom": {"secretKeyRef": {"name": name, "key": export}}}
        variables.append({"name": export, **(key if export in secret else {"value": _literal(environment[export])})})
    launcher = {
        "name": "launcher",
        "args": [_literal(word) for word in (*START, *command)],
        "env": variables,
        "resources": {"requests": OF_LAUNCHER},
    }
    amount = options["memory"].rstrip("MGTi")
    memory = f"{int(amount) * slots}{options['memory'].removeprefix(amount)}"
    worker: dict[str, Any] = {
        "name": "worker",
        "args": ["sshd"],
        "env": [{"name": "SSH_PORT", "value": str(PORT)}],
        "readinessProbe": {"tcpSocket": {"port": PORT}, "periodSeconds": 1},
        "resources": {"requests": {"cpu": str(int(options["cpu"]) * slots), "memory": memory}},
    }
    if gpus:
        worker["resources"]["limits"] = {"nvidia.com/gpu": slots}
    policy = {"cleanPodPolicy": "Running", "backoffLimit": LOST_LAUNCHERS if restarts else 0}
    replicas = {
        "Launcher": {"replicas": 1, "restartPolicy": "Never", "template": _pod(launcher, options, grace_s)},
        "Worker": {
            "replicas": len(workers),
            "restartPolicy": "OnFailure",
            "template": _pod(worker, options, grace_s, memory="/dev/shm"),  # noqa: S108 (else it has 64 MB)
        },
    }
    job = {
        "apiVersion": "kubeflow.org/v2beta1",
        "kind": "MPIJob",
        "metadata": {"name": name},
        "spec": {
            "slotsPerWorker": slots,
            "launcherCreationPolicy": "WaitForWorkersReady",
            "sshAuthMountPath": KEYS,
            "runPolicy": policy,
            "mpiReplicaSpecs": replicas,
        },
    }
    return json.dumps(job, indent=2) + "\n"


def _pod(container: Mapping[str, Any], options: Options, grace_s: float, memory: str | None = None) -> dict[str, Any]:
    """Return a pod of one container that works in the claim; an in-memory file system is mounted at `memory`."""
    volumes = {"shared": {"persistentVolumeClaim": {"claimName": options["claim"]}}}
    mounts = {"shared": SHARED}
    if memory is not None:
        volumes["memory"], mounts["memory"] = {"emptyDir": {"medium": "Memory"}}, memory
    whole = {
        **container,
        "image": options["image"],
        "workingDir": SHARED,
        "volumeMounts": [{"name": name, "mountPath": path} for name, path in mounts.items()],
    }
    return {
        "spec": {
            "terminationGracePeriodSeconds": math.ceil(grace_s) + CLEAN_UP_S,
            "securityContext": {"runAsUser": USER, "fsGroup": USER},
            "containers": [whole],
            "volumes": [{"name": name, **source} for name, source in volumes.items()],
        }
    }


def _literal(text: str) -> str:
    """Escape text for Kubernetes, which expands $(NAME) and turns $$ into $."""
    return text.replace("$", "$$")


def secrets(exports: Sequence[str], environment: Mapping[str, str]) -> tuple[str, ...]:
    """Return the variables whose values are not written to the file."""
    return tuple(name for name in exports if is_secret(name, environment[name]))


def parse_options(assignments: Sequence[str], usual_cores: int) -> dict[str, str]:
    """Parse --batch-option into a dict; ranks have `usual_cores` by default. CommandError for invalid options."""
    options = {"cpu": str(usual_cores), "memory": MEMORY}
    for word in assignments:
        key, _, value = word.partition("=")
        if key not in PLAIN:
            raise CommandError(f"--batch-option {shown(word)}: unknown. Write {' or '.join(EXAMPLES.values())}.")
        if not re.fullmatch(PLAIN[key], value, re.ASCII):
            raise CommandError(f"--batch-option {shown(word)}: not supported. Write a value such as {EXAMPLES[key]}.")
        options[key] = value
    return options


def missing(options: Mapping[str, str], np: int | None) -> list[str]:
    """Return what a job needs in addition to these options and `np`, with notation and meaning."""
    lacking = [] if np is not None else ["-np N (the ranks of the job; --per-host N are those of each pod)"]
    return lacking + [f"--batch-option {EXAMPLES[key]} ({what})" for key, what in NEEDED.items() if key not in options]


def workers(np: int, per_host: int | None) -> tuple[Host, ...]:
    """Return the pods with ranks as hosts with equal slots; CommandError if they are not full."""
    slots = per_host or np
    if np % slots:
        raise CommandError(f"--per-host {slots}: -np {np} is not a multiple of it, but Kubernetes makes all pods alike")
    return tuple(Host(name=f"worker-{number}", slots=slots) for number in range(np // slots))


def plain_name(name: str, *, stamp: str = "") -> str:
    """Convert a name for Kubernetes: lower-case letters, digits and '-', a letter first; the stamp is kept whole."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
    end = f"-{stamp}" if stamp else ""
    return (plain if plain[:1].isalpha() else f"job-{plain}")[: NAME_CHARS - len(end)].strip("-") + end
