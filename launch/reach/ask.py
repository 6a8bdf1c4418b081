"""Questions to many hosts at once: this one answers here, the others over ssh."""

import contextlib
import dataclasses
import socket
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import TypeVar

from launch.errors import HostError, LaunchError, ProcessError
from launch.machine.mpi import Mpi
from launch.process import ask, stop_asking
from launch.reach.probe import MARK, HostFacts, facts_from_json, local_facts, probe_words
from launch.reach.ssh import SSH_OPTIONS, ask_over_ssh

ASK_TIMEOUT_S = 12.0  # more than a driver may take there; a run must refuse within 15
REACH_TIMEOUT_S = 4.0  # to see whether a host is there at all
AT_ONCE = 64  # hosts, each with an ssh of its own here

Reply = TypeVar("Reply")


def ask_hosts(hosts: Sequence[str], *, mpirun: Mpi, python: str, folder: str, gpus: bool) -> dict[str, HostFacts]:
    """The facts of all hosts, as `answers` gives them; LaunchError names the first host that cannot be used."""
    facts = {}
    for host, answer in answers(hosts, mpirun=mpirun, python=python, folder=folder, gpus=gpus).items():
        if isinstance(answer, LaunchError):
            raise answer
        facts[host] = answer
    return facts


def answers(
    hosts: Sequence[str], *, mpirun: Mpi, python: str, folder: str, gpus: bool
) -> dict[str, HostFacts | LaunchError]:
    """The facts of each host, or the reason why it cannot be used; other hosts are asked over ssh.

    On each host `python` is started in `folder`, and `mpirun` must be the same version as here.
    """
    words = probe_words(python, mpirun.path, gpus=gpus)

    def facts_of(host: str) -> HostFacts | LaunchError:
        try:
            if is_local(host):
                facts = dataclasses.replace(local_facts(mpirun, gpus=gpus), host=host, address=None)
            else:
                facts = _facts_over_ssh(host, words, folder)
        except LaunchError as error:
            return error
        if facts.mpi == mpirun:
            return facts
        there = f"is {facts.mpi}" if facts.mpi else "is missing"
        return HostError(
            f"host {host}: {mpirun.path} {there}, here it is {mpirun}: install the same MPI at the same path"
        )

    return at_once(facts_of, hosts)


def _facts_over_ssh(host: str, words: Sequence[str], folder: str) -> HostFacts:
    return facts_from_json(ask_over_ssh(host, words, folder, mark=MARK, timeout_s=ASK_TIMEOUT_S), host)


def at_once(question: Callable[[str], Reply], hosts: Sequence[str]) -> dict[str, Reply]:
    """What `question` returns for each host, AT_ONCE of them at a time; an error or a signal ends the asking."""
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        try:
            return dict(zip(hosts, pool.map(question, hosts), strict=True))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            stop_asking()
            raise


@cache
def is_local(host: str) -> bool:
    """Whether this is a name or an address of this machine."""
    if host in ("localhost", socket.gethostname()):
        return True
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        try:
            trial.bind((host, 0))
        except OSError:
            return False  # unknown, or another machine's
    return True


def silent_host(hosts: Collection[str]) -> str | None:
    """The first of these hosts that does not answer over ssh; None if all do."""

    def is_reached(host: str) -> bool:
        with contextlib.suppress(ProcessError):
            return ask(["ssh", *SSH_OPTIONS, host, "true"], timeout_s=REACH_TIMEOUT_S).status == 0
        return False

    reached = at_once(is_reached, [host for host in dict.fromkeys(hosts) if not is_local(host)])
    return next((host for host, answered in reached.items() if not answered), None)


def address_toward(address: str) -> str:
    """This machine's own address on the way to another one's; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.connect((address, 9))
        return str(trial.getsockname()[0])
