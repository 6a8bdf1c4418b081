"""Probes many hosts in parallel: this host directly, the others over ssh."""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from launch.errors import HostError, LaunchError
from launch.hosts.host_facts import MARK, HostFacts, facts_from_json, local_facts, probe_command, version
from launch.hosts.ssh import Ssh
from launch.machine.condition import Inspection
from launch.machine.local import DRIVER_TIMEOUT_S
from launch.machine.mpi import Mpi
from launch.process import stop_asking

AT_ONCE = 64  # hosts, each with a connection of its own
ANSWER_S = 2.0  # for ssh and everything else except the driver's response

Reply = TypeVar("Reply")


def all_usable(answers: Mapping[str, HostFacts | LaunchError]) -> dict[str, HostFacts]:
    """Return the facts of all hosts that were probed; LaunchError names every host that is unusable."""
    if refused := {host: answer for host, answer in answers.items() if isinstance(answer, LaunchError)}:
        raise combine_errors(refused, of=len(answers))
    return {host: answer for host, answer in answers.items() if isinstance(answer, HostFacts)}


def combine_errors(refused: Mapping[str, LaunchError], *, of: int) -> LaunchError:
    """Return the only error, or one that names all hosts, with each reason once as a detail."""
    if len(refused) == 1:
        return next(iter(refused.values()))
    alike: dict[str, list[str]] = {}
    for host, error in refused.items():
        alike.setdefault(str(error).replace(host, ""), []).append(host)
    details: list[str] = []
    for first, *others in alike.values():
        same = f"; the same on {', '.join(others)}" if others else ""
        details += [f"{refused[first]}{same}", *(f"    {line}" for line in refused[first].details)]
    line = f"{len(refused)} of {of} hosts cannot be used: {', '.join(refused)}: fix them, or leave them out"
    return HostError(line, details)


def probe_hosts(
    hosts: Sequence[str],
    *,
    ssh: Ssh,
    mpirun: Mpi,
    python: str,
    folder: str,
    gpus: bool,
    inspection: Inspection | None = None,
    any_version: bool = False,
) -> dict[str, HostFacts | LaunchError]:
    """Return the facts of each host, or the reason why it is unusable; other hosts are probed over `ssh`.

    On each host `python` is started in `folder`; with an `inspection` it also reports its condition. Unless
    `any_version`, the project and `mpirun` must have equal versions on all hosts.
    """
    command = probe_command(python, mpirun.path, gpus=gpus, inspection=inspection)
    ours = cache(version)  # of the code currently on disk: it may change on all hosts during a long run

    def facts_of(host: str) -> HostFacts | LaunchError:
        try:
            if is_local(host):
                local = local_facts(mpirun, gpus=gpus, inspection=inspection)
                facts = dataclasses.replace(local, host=host, address=None)
            else:
                report = ssh.ask(host, command, folder, mark=MARK, timeout_s=DRIVER_TIMEOUT_S + ANSWER_S)
                facts = facts_from_json(report, host, ours(), inspection=inspection, any_version=any_version)
        except LaunchError as error:
            return error
        return facts if any_version else other_mpi(facts, mpirun) or facts

    return at_once(facts_of, hosts)


def other_mpi(facts: HostFacts, mpirun: Mpi) -> HostError | None:
    """Return the error about a host on which `mpirun` is missing, or has another version."""
    if facts.mpi == mpirun:
        return None
    their_mpi = f"is {facts.mpi}" if facts.mpi else "is missing"
    return HostError(
        f"host {facts.host}: {mpirun.path} {their_mpi}, here it is {mpirun}: install the same MPI at the same path"
    )


def at_once(question: Callable[[str], Reply], hosts: Sequence[str]) -> dict[str, Reply]:
    """Return the result of `question` for each host, at most AT_ONCE in parallel; an error or a signal ends all."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        try:
            return dict(zip(hosts, pool.map(question, hosts), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_asking()
            raise


@cache
def is_local(host: str) -> bool:
    """Return whether this is a name or an address of this machine."""
    if host.lower() in ("localhost", socket.gethostname().lower()):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial, contextlib.suppress(OSError):
        trial.bind((host, 0))
        return True
    return False  # unknown, or another machine's


def silent_host(hosts: Collection[str], ssh: Ssh) -> str | None:
    """Return the first of these hosts that cannot be reached; None if all can."""
    reached = at_once(ssh.reaches, [host for host in dict.fromkeys(hosts) if not is_local(host)])
    return next((host for host, answered in reached.items() if not answered), None)
