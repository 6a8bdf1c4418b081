"""Read-only questions to hosts: their GPUs, NICs and cores, and whether a run could start there.

python -m launch.reach.probe MPIRUN gpus|none [VISIBLE]       what this host answers, as one line of JSON
"""

import dataclasses
import json
import os
import re
import shlex
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import TypeVar

from launch.errors import HostError, LaunchError, ProcessError
from launch.machine import nvidia_smi, nvml, rocm_smi, system
from launch.machine.speeds import between_sockets
from launch.machine.topology import Topology, from_json, to_json
from launch.process import Answer, ask, find, stop_asking

# Nothing may ask a question, nothing may be trusted that is not known already, and silence ends.
SSH_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "StrictHostKeyChecking=yes"),
    *("-o", "ConnectTimeout=5"),
    *("-o", "ServerAliveInterval=2"),
    *("-o", "ServerAliveCountMax=2"),
)
ASK_TIMEOUT_S = 12.0  # a driver that wakes up takes seconds; a run must refuse within 15
MARK = "hvdlaunch-facts "

Reply = TypeVar("Reply")


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """An installed mpirun."""

    path: str  # absolute
    name: str  # Open MPI, MPICH, Intel MPI, or the first line that it printed
    version: tuple[int, ...]  # 4, 1, 8

    def __str__(self) -> str:
        return f"{self.name} {'.'.join(map(str, self.version))}"


@dataclass(frozen=True, kw_only=True)
class HostFacts:
    """What a host answered."""

    host: str  # its name in the list of hosts
    hostname: str | None  # what it calls itself; None where nobody was asked
    topology: Topology
    mpi: Mpi | None = None
    address: str | None = None  # where ssh reached it; None on this host, and over IPv6


def here(found: Mpi | None, *, gpus: bool, visible: str | None) -> HostFacts:
    """The facts of this host; GPUs outside `visible` count as taken, none is looked for without `gpus`."""
    reached = os.environ.get("SSH_CONNECTION", "").split()
    return HostFacts(
        host="localhost",
        hostname=socket.gethostname(),
        topology=restrict(this_topology(gpus=gpus), visible),
        mpi=found,
        address=reached[2] if len(reached) == 4 and ":" not in reached[2] else None,
    )


def ask_hosts(hosts: Sequence[str], *, mpirun: Mpi, python: str, folder: str, gpus: bool) -> dict[str, HostFacts]:
    """The facts of all hosts, as `answers` finds them; LaunchError names the first that cannot be used."""
    facts = {}
    for host, answer in answers(hosts, mpirun=mpirun, python=python, folder=folder, gpus=gpus).items():
        if isinstance(answer, LaunchError):
            raise answer
        facts[host] = answer
    return facts


def answers(
    hosts: Sequence[str], *, mpirun: Mpi, python: str, folder: str, gpus: bool
) -> dict[str, HostFacts | LaunchError]:
    """The facts of each host, of other hosts over ssh, all at once; of one that cannot be used the reason.

    On each host `python` is started in `folder`, and `mpirun` must be the same version as here.
    """
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    words = [python, "-P", "-m", "launch.reach.probe", mpirun.path, "gpus" if gpus else "none"]
    words += [] if visible is None else [visible]

    def facts_of(host: str) -> HostFacts | LaunchError:
        try:
            facts = (
                dataclasses.replace(here(mpirun, gpus=gpus, visible=visible), host=host, address=None)
                if is_local(host)
                else _ask_host(host, words, folder)
            )
        except LaunchError as error:
            return error
        if facts.mpi == mpirun:
            return facts
        there = f"is {facts.mpi}" if facts.mpi else "is missing"
        return HostError(
            f"host {host}: {mpirun.path} {there}, here it is {mpirun}: install the same MPI at the same path"
        )

    return at_once(facts_of, hosts)


def at_once(question: Callable[[str], Reply], hosts: Sequence[str]) -> dict[str, Reply]:
    """What `question` returns for each host, all asked side by side; an error, or a signal, ends the asking."""
    with ThreadPoolExecutor(max_workers=min(128, len(hosts) + 1)) as pool:
        try:
            return dict(zip(hosts, pool.map(question, hosts), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_asking()
            raise


@cache
def is_local(host: str) -> bool:
    """Whether this name is this machine's."""
    if host in ("localhost", socket.gethostname()):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((host, 0))
        except OSError:
            return False  # unknown, or another machine's
    return True


def address_toward(address: str) -> str:
    """This machine's own address on the way to another one's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def ask_over_ssh(host: str, words: Sequence[str], folder: str, *, mark: str, timeout_s: float) -> str:
    """What a program there, started in `folder`, says last behind the mark; HostError if it says nothing."""
    command = f"cd {shlex.quote(folder)} && exec {shlex.join(words)}"
    try:
        answer = ask(["ssh", *SSH_OPTIONS, host, command], timeout_s=timeout_s)
    except ProcessError as error:
        raise HostError(f"host {host}: {error}") from error
    told = [line.removeprefix(mark) for line in answer.out.splitlines() if line.startswith(mark)]
    if answer.status or not told:
        raise HostError(f"host {host}: {why_not(answer, host=host, python=words[0], folder=folder)}")
    return told[-1]


def _ask_host(host: str, words: Sequence[str], folder: str) -> HostFacts:
    facts = json.loads(ask_over_ssh(host, words, folder, mark=MARK, timeout_s=ASK_TIMEOUT_S))
    known = facts["mpi"]
    return HostFacts(
        host=host,
        hostname=facts["hostname"],
        topology=from_json(facts["topology"]),
        mpi=None if known is None else Mpi(**{**known, "version": tuple(known["version"])}),
        address=facts["address"],
    )


SSH_TROUBLE = {
    "hvdlaunch: ": "{last}",  # first: it may quote any of the others
    "Connection refused": "ssh is refused: start sshd there, or name another host",
    "Could not resolve hostname": "unknown host name: correct -H, or give it an address in /etc/hosts or ~/.ssh/config",
    "IDENTIFICATION HAS CHANGED": "its host key is not the one in known_hosts: if the host was really replaced, "
    "`ssh-keygen -R {host}` and connect to it once by hand",
    "Host key verification failed": "its host key is unknown: connect to it once by hand, `ssh {host}`, to accept it",
    "Permission denied": "ssh asks for a password: copy a key there, with `ssh-copy-id {host}`",
    "timed out": "ssh gets no answer: see whether the host and its sshd are well",
    "not responding": "ssh gets no answer: see whether the host and its sshd are well",
    "No route to host": "no route to it: see whether the host is up",
    "Network is unreachable": "its network cannot be reached from here",
    "No module named": "{python} there has no hvdlaunch: install the project there as here",
    "cd: ": "it has no folder {folder}: share this folder with the host, or start from one that both have",
    "not found": "it has no {python}: install the project there at the same path as here",
    "No such file": "it has no {python}: install the project there at the same path as here",
}


def why_not(answer: Answer, *, host: str, python: str, folder: str) -> str:
    """One line for what ssh, or the program there, said on standard error."""
    last = (answer.err.strip() or f"ended with status {answer.status} without a word").splitlines()[-1]
    for sign, meaning in SSH_TROUBLE.items():
        if sign in answer.err:
            return meaning.format(host=host, python=python, folder=folder, last=last.removeprefix("hvdlaunch: "))
    return f"asked over ssh, it said: {last}"


def this_topology(*, gpus: bool) -> Topology:
    """What this host has; its GPUs by NVML, else by nvidia-smi, else by rocm-smi, none where nothing answers."""
    return dataclasses.replace(
        _gpu_topology() if gpus else Topology(source="none"),
        numa_nodes=system.numa_nodes(system.SYSFS, frozenset(os.sched_getaffinity(0))),
        interfaces=system.interfaces(),
    )


NO_GPU = (6, 9, 12)  # nvidia-smi's status where there is no device, no driver, no library


def _gpu_topology() -> Topology:
    if (topology := _in_time(nvml.read_nvml)) is not None:
        return topology
    if find("nvidia-smi"):
        matrix = ask(["nvidia-smi", "topo", "-m"], timeout_s=ASK_TIMEOUT_S - 2)
        if matrix.status in NO_GPU:
            return Topology(source="none")
        return nvidia_smi.from_nvidia_smi(
            _said("nvidia-smi topo -m", matrix),
            _may_say("nvidia-smi", f"--query-gpu={nvidia_smi.QUERY}", "--format=csv,noheader"),
            _may_say("nvidia-smi", f"--query-compute-apps={nvidia_smi.QUERY_APPS}", "--format=csv,noheader"),
            sockets_gbps=between_sockets(system.cpuinfo()),
        )
    if find("rocm-smi"):
        shown = ask(["rocm-smi", "--showtopo"], timeout_s=ASK_TIMEOUT_S - 2)
        return rocm_smi.parse(_said("rocm-smi --showtopo", shown), name="rocm-smi --showtopo")
    return Topology(source="none")


def _in_time(read: Callable[[], Topology | None]) -> Topology | None:
    """What `read` returns; ProcessError if a driver that hangs keeps it too long."""
    answer: Future[Topology | None] = Future()

    def run() -> None:
        try:
            answer.set_result(read())
        except BaseException as error:  # noqa: BLE001 (raised again where it is waited for)
            answer.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return answer.result(ASK_TIMEOUT_S - 2)
    except TimeoutError:
        raise ProcessError(f"NVML gave no answer in {ASK_TIMEOUT_S - 2:g} s: see whether nvidia-smi does") from None


def _said(command: str, answer: Answer) -> str:
    if answer.status:
        said = (answer.err or answer.out).strip().splitlines() or ["nothing"]
        raise ProcessError(f"{command} failed with status {answer.status} and said: {said[0]}")
    return answer.out


def _may_say(*argv: str) -> str | None:
    answer = ask(argv, timeout_s=ASK_TIMEOUT_S - 2)
    return None if answer.status else answer.out


def restrict(topology: Topology, visible: str | None) -> Topology:
    """The topology with the GPUs outside a CUDA_VISIBLE_DEVICES marked as not to be used; None restricts nothing.

    Numbers are indices in PCI order; an empty list leaves no GPU at all. ProcessError where it names none of them.
    """
    if visible is None or not topology.gpus:
        return topology
    if visible.strip() in ("", "-1", "NoDevFiles"):
        return dataclasses.replace(topology, gpus=(), links=(), nics=())
    inside: set[int] = set()
    for entry in (word.strip() for word in visible.split(",")):
        match = [
            gpu.index
            for gpu in topology.gpus
            if entry == str(gpu.index) or (entry.startswith("GPU-") and (gpu.uuid or "").startswith(entry))
        ]
        if len(match) != 1:
            raise ProcessError(
                f"CUDA_VISIBLE_DEVICES names {entry!r}, which is no GPU of this host: give indices or UUIDs of "
                "`nvidia-smi -L`, or unset it"
            )
        inside |= set(match)
    gpus = tuple(
        gpu
        if gpu.index in inside
        else dataclasses.replace(gpu, unusable=gpu.unusable or "outside your CUDA_VISIBLE_DEVICES")
        for gpu in topology.gpus
    )
    return dataclasses.replace(topology, gpus=gpus)


def mpi(mpirun: str) -> Mpi | None:
    """What this mpirun is; None where it is missing."""
    try:
        said = ask([mpirun, "--version"], timeout_s=ASK_TIMEOUT_S - 2)
    except ProcessError:
        return None
    return parse_mpi(mpirun, said.out + said.err)


def parse_mpi(path: str, text: str) -> Mpi | None:
    """An MPI from what `mpirun --version` printed; None if it does not say."""
    name = next(
        (name for sign, name in (("Open MPI", "Open MPI"), ("HYDRA", "MPICH"), ("Intel", "Intel MPI")) if sign in text),
        None,
    )
    number = re.search(r"(?:Open MPI\)|Version:?)\s*(\d+(?:\.\d+)*)", text)
    if name is None or number is None:
        return None
    return Mpi(path=path, name=name, version=tuple(map(int, number[1].split("."))))


def main(mpirun: str, gpus: str, visible: str | None = None) -> None:
    """Print this host's facts."""
    try:
        facts = here(mpi(mpirun), gpus=gpus == "gpus", visible=os.environ.get("CUDA_VISIBLE_DEVICES", visible))
    except LaunchError as error:
        sys.exit(f"hvdlaunch: {error}")
    found = None if facts.mpi is None else dataclasses.asdict(facts.mpi)
    told = {"hostname": facts.hostname, "mpi": found, "address": facts.address, "topology": to_json(facts.topology)}
    print(f"{MARK}{json.dumps(told)}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
