"""Runs of a peer's program that a fault strikes: its commands, what is left of it, and the verdict from that.

A folder keeps all that a verdict needs, so a run is judged again without a new one: statuses in run.json, the output of
each command, and the notes of bench/peers/fault.py.
"""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil

from tests.cluster import hosts

PEERS = Path(__file__).parent / "peers"
BIN = Path(sys.prefix) / "bin"
QUIET_S = 90.0  # without a new step a command hangs: each tool has a limit of 10 s for a collective or a step
QUIET_OVER_HOSTS_S = 120.0
HOSTS = ("h1", "h2")
NIC = "eth0"  # of both
LOOPBACK = ("localhost", "127.0.0.1")  # two hosts to Elastic Horovod, which gives up a host whose rank has died
DISK = "size=5m"  # room for all checkpoints of an undisturbed run
MARK = "# for faults"
Commands = dict[str, list[str]]  # by host


@dataclass(frozen=True, kw_only=True)
class Side:
    """A program of bench/peers/ and how its documentation starts it."""

    package: str
    program: str
    local: Commands
    on_hosts: Commands
    checkpoints: str  # pattern of what a save writes

    @property
    def lines(self) -> int:
        """Return the number of lines that the program has for faults alone."""
        return (PEERS / f"{self.program}.py").read_text().count(MARK)


def _program(name: str) -> list[str]:
    return [sys.executable, str(PEERS / f"{name}.py")]


def _torchrun(program: str) -> tuple[Commands, Commands]:
    words = [str(BIN / "torchrun"), "--max-restarts", "1"]
    rendezvous = ["--rdzv-id", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{HOSTS[0]}:29400"]
    over_hosts = [*words, "--nnodes", "1:2", "--nproc-per-node", "1", *rendezvous, "--rdzv-conf", "last_call_timeout=5"]
    file = str(PEERS / f"{program}.py")
    local = [*words, "--standalone", "--nproc-per-node", "2", file]
    return {"localhost": local}, {host: [*over_hosts, file] for host in HOSTS}


def _accelerate() -> tuple[Commands, Commands]:
    """Return the commands for GPUs, which start ranks on CPUs too; those for CPUs start one rank, or mpirun.

    Its default rendezvous, static, keeps the addresses of ended ranks, so that a restart fails: here it is c10d.
    """
    words = [str(BIN / "accelerate"), "launch", "--multi_gpu", "--mixed_precision", "no", "--num_processes", "2"]
    words += ["--dynamo_backend", "no", "--max_restarts", "1", "--rdzv_backend", "c10d"]
    file = str(PEERS / "with_accelerate.py")
    over_hosts = [*words, "--num_machines", "2", "--main_process_ip", HOSTS[0], "--main_process_port", "29400"]
    local = [*words, "--num_machines", "1", file]
    return {"localhost": local}, {
        host: [*over_hosts, "--machine_rank", str(rank), file] for rank, host in enumerate(HOSTS)
    }


def _deepspeed() -> tuple[Commands, Commands]:
    words, file = [str(BIN / "deepspeed")], str(PEERS / "with_deepspeed.py")
    over_hosts = [*words, "--no_ssh", "--hostfile", "hostfile", "--master_addr", HOSTS[0], "--node_rank"]
    local = [*words, "--num_accelerators", "2", file]
    return {"localhost": local}, {host: [*over_hosts, str(rank), file] for rank, host in enumerate(HOSTS)}


def _horovodrun() -> tuple[Commands, Commands]:
    words = [str(BIN / "horovodrun"), "-np", "2", "--min-np", "1", "--stall-check-warning-time-seconds", "2"]
    words += ["--stall-check-shutdown-time-seconds", "10"]

    def over(hosts: Sequence[str], nic: str) -> list[str]:
        where = ["--host-discovery-script", f"./{hosts[0]}.sh", "--network-interfaces", nic]
        return [*words, *where, *_program("elastic_horovod")]

    return {LOOPBACK[0]: over(LOOPBACK, "lo")}, {HOSTS[0]: over(HOSTS, NIC)}


def _hvdlaunch() -> tuple[Commands, Commands]:
    words = [str(BIN / "hvdlaunch"), "run", "-np", "2", "--gpus", "none", "--restarts", "1"]
    over_hosts = ["-H", f"{HOSTS[0]}:1,{HOSTS[1]}:1", "--min-np", "1", "--silence-s", "10"]
    over_hosts += ["-x", "FAULT", "-x", "FAULT_NOTES"]
    training = ["--epochs", "4", "--global-batch-size", "128", "--optimizer", "sgd", "--lr", "0.1"]
    for_faults = ["--run", "mine", "--checkpoint-every", "10steps"]
    program = ["--", *_program("with_hvdtrain"), *training, *for_faults]
    return {"localhost": [*words, *program]}, {HOSTS[0]: [*words, *over_hosts, *program]}


def _side(package: str, program: str, commands: tuple[Commands, Commands], checkpoints: str) -> Side:
    return Side(package=package, program=program, local=commands[0], on_hosts=commands[1], checkpoints=checkpoints)


SIDES = {
    "hvdtrain": _side("hvdtrain", "with_hvdtrain", _hvdlaunch(), "runs/*/mine/checkpoints/step-*"),
    "torchrun": _side("torch", "ddp", _torchrun("ddp"), "snapshot.pt"),
    "Accelerate": _side("accelerate", "with_accelerate", _accelerate(), "epoch_*"),
    "Lightning": _side("lightning", "trainer_of_lightning", _torchrun("trainer_of_lightning"), "checkpoints/*.ckpt"),
    "DeepSpeed": _side("deepspeed", "with_deepspeed", _deepspeed(), "checkpoints/global_step*"),
    "Elastic Horovod": _side("horovod", "elastic_horovod", _horovodrun(), "checkpoint-*.pt"),
}
# The lines of all tools that name a rank as the cause; the first one in the output decides.
BLAMES = re.compile(
    r"exitcode: -?\d+\) local_rank: (?P<agent>\d)"  # torchrun's agent, at each failure
    r"|rank (?P<ended>\d) on \S+ (?:died|hung|did not arrive|ended)"
    r"|rank (?P<called>\d) made a call"
    r"|in the loss of rank (?P<loss>\d)"
    r"|no longer answers; it had rank (?P<silent>\d)"
    r"|Process (?P<process>\d) exit with status code"  # horovodrun
    r"|[Mm]issing ranks:?\s*\[?(?P<stalled>\d)"  # Horovod's stall check
    r"|straggler: host \S+ \(rank (?P<slow>\d)\)"
    r"|rank (?P<data>\d) has other training samples"
)


class Run:
    """A run in its folder."""

    def __init__(self, side: Side, fault: str, folder: Path) -> None:
        self.side, self.fault, self.folder = side, fault, folder
        self.work, self.notes = folder / "work", folder / "notes"
        self.cluster: hosts.Cluster | None = None
        self._attempts = 0

    def prepare(self, before: Path | None = None) -> None:
        """Make its folders; the working folder is that of an earlier run if there is one."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)
        if before is None:
            self.work.mkdir()
            self.notes.mkdir()
        else:
            shutil.copytree(before / "work", self.work, symlinks=True)
            shutil.copytree(before / "notes", self.notes, symlinks=True)
        if self.fault == "disk":
            subprocess.run(["mount", "-t", "tmpfs", "-o", DISK, "tmpfs", self.work], check=True)
        for names in (LOOPBACK, HOSTS):
            script = self.work / f"{names[0]}.sh"
            script.write_text("".join(["#!/bin/sh\n", *(f"echo {name}:1\n" for name in names)]))
            script.chmod(0o755)
        (self.work / "hostfile").write_text("".join(f"{host} slots=1\n" for host in HOSTS))

    def last_step(self) -> int:
        """Return the last step that a rank has begun."""
        return max((number for steps in _steps(self.notes).values() for number, _ in steps), default=0)

    def _last_s(self) -> float:
        """Return when the last step began."""
        return max((file.stat().st_mtime for file in self.notes.glob("*.steps")), default=0.0)

    def command(self, watch: Callable[["Run"], object] = bool) -> bool:
        """Give the side's command and call `watch` while it runs; nothing of it is left. Return whether it did all."""
        attempt, began = self._attempts, time.time()
        self._attempts += 1
        jobs: list[Any] = []
        with contextlib.ExitStack() as files:
            for host, words in (self.side.on_hosts if self.cluster else self.side.local).items():
                output = files.enter_context((self.folder / f"output-{attempt}-{host}").open("w"))
                where: dict[str, Any] = {
                    "cwd": self.work,
                    "env": self._environment(),
                    "stdout": output,
                    "stderr": output,
                }
                if self.cluster:
                    jobs.append(self.cluster.start(host, words, **where))
                else:
                    jobs.append(subprocess.Popen(words, stdin=subprocess.DEVNULL, start_new_session=True, **where))
            limit_s = QUIET_OVER_HOSTS_S if self.cluster else QUIET_S
            self.job = jobs[0]  # what the user has started, on the first host
            while self.job.poll() is None and time.time() < max(began, self._last_s()) + limit_s:
                watch(self)
                time.sleep(0.05)
            status = self.job.poll()
        done = json.loads(self._file.read_text()) if attempt else []
        self._file.write_text(json.dumps([*done, {"began": began, "status": status, "ended": time.time()}]))
        return Verdict(self.side, self.fault, self.folder).is_finished

    @property
    def _file(self) -> Path:
        return self.folder / "run.json"

    def _environment(self) -> dict[str, str]:
        """One thread for a rank, no GPU, and nothing of another launcher."""
        others = ("OMPI_", "PYTHON", "HVD", "HOME", "USER", "LOGNAME", "SHELL")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(others)}
        return {
            **({} if self.cluster else kept),
            "PATH": f"{BIN}:{os.environ['PATH']}",
            "HOME": os.environ.get("HOME", "/"),
            "FAULT": self.fault,
            "FAULT_NOTES": str(self.notes),
            "OMP_NUM_THREADS": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "DS_ACCELERATOR": "cpu",
            "TORCH_EXTENSIONS_DIR": f"{sys.prefix}/torch_extensions",
            "GLOO_SOCKET_IFNAME": NIC if self.cluster else "lo",
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # else a restart may read old addresses: pytorch/pytorch#135712
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        }

    def strike(self) -> bool:
        """Note a fault that comes from outside; return whether it is the first time."""
        with contextlib.suppress(FileExistsError), (self.notes / "struck").open("x") as note:
            note.write(str(time.time()))
            return True
        return False


def end_all() -> None:
    """Kill each other process of the namespace, of which this is the first."""
    while True:
        left = [one for one in psutil.process_iter(["status"]) if one.info["status"] != psutil.STATUS_ZOMBIE][1:]
        if not left:
            return
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        time.sleep(0.02)


def _steps(notes: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the steps that each process began, and when, by the name of its file."""
    found = {}
    for file in notes.glob("*.steps"):
        words = [line.split() for line in file.read_text().splitlines()]
        found[file.stem] = [(int(number), float(began)) for number, began in words]
    return found


class Verdict:
    """The result of a run, from its folder."""

    def __init__(self, side: Side, fault: str, folder: Path) -> None:
        self._side, self._fault, self._folder, self._notes = side, fault, folder, folder / "notes"
        self._attempts = json.loads((folder / "run.json").read_text())
        self.statuses = [attempt["status"] for attempt in self._attempts]  # None if it hung
        last = self._attempts[-1]["began"]
        self._ends = [file for file in sorted(self._notes.glob("*.npy")) if file.stat().st_mtime > last]
        self.weights = [np.load(file) for file in self._ends]

    @property
    def is_finished(self) -> bool:
        return self.statuses[-1] == 0 and bool(self.weights) and all(np.isfinite(one).all() for one in self.weights)

    @property
    def survived(self) -> str:
        """Say how the run came to its end: by itself, by the same command again, or not."""
        first = self._attempts[0]
        if (
            self._fault == "data"
            and first["status"]
            and not any(began < first["ended"] for steps in _steps(self._notes).values() for _, began in steps)
        ):
            return "refused"
        if self.is_finished:
            was_stopped = self._fault == "term" and self.statuses[0] is not None
            return "yes" if len(self.statuses) == 1 or was_stopped else "again"
        if any(np.isnan(one).any() for one in self.weights):
            return "NaN"
        return "hangs" if self.statuses[0] is None else "no"

    def equal(self, undisturbed: npt.NDArray[np.float32]) -> str:
        """Compare the trained weights with those of an undisturbed run."""
        if not self.is_finished:
            return ""
        if any(not np.array_equal(one, self.weights[0]) for one in self.weights):
            return "ranks differ"
        if np.array_equal(self.weights[0], undisturbed):
            return "yes"
        return "rounded" if np.allclose(self.weights[0], undisturbed, rtol=1e-3, atol=1e-5) else "no"

    def went_on(self) -> tuple[float | None, int | None]:
        """Return the seconds from the fault until the first step after it ended, and how many steps were done again."""
        if not self.is_finished:
            return None, None
        struck, processes = float((self._notes / "struck").read_text()), _steps(self._notes)
        after = [[one for one in processes.get(file.stem, []) if one[1] > struck] for file in self._ends]
        first = min((steps[0] for steps in after if steps), key=lambda one: one[1], default=None)
        if first is None:
            return None, 0
        ended = min((steps[1][1] for steps in after if len(steps) > 1), default=self._ends[0].stat().st_mtime)
        if self._fault == "host":  # an epoch of one rank has other steps
            return ended - struck, None
        before = [number for steps in processes.values() for number, began in steps if began < first[1]]
        return ended - struck, max(0, max(before, default=0) - first[0])

    def output(self) -> str:
        """Return what the first command printed, on the first host."""
        return min(self._folder.glob("output-0-*")).read_text(errors="replace")

    def named(self, culprit: int | str) -> str:
        """Say whether the output names this rank as the cause, or these words."""
        if isinstance(culprit, str):
            lines = re.sub(r"^\[rank\d\]: ", "", self.output(), flags=re.MULTILINE).splitlines()
            is_named = any(culprit in line and not line[0].isspace() for line in lines)  # not source in a traceback
            return "yes" if is_named else "no"
        blame = BLAMES.search(self.output())
        if blame is None:
            return "no"
        rank = next(int(rank) for rank in blame.groups() if rank)
        return "yes" if rank == culprit else f"rank {rank}"
