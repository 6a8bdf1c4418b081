"""Connections between the hosts themselves over each network that they may use; nothing on the hosts is changed.

python -m launch.hosts.connect TRIAL        prints one line of JSON: why each network failed, or ""

The hosts form a ring: each listens, and connects to the next one. That takes one connection per host and network, and
a ring always has a link between two groups of hosts that do not reach each other.
"""

import asyncio
import contextlib
import json
import os
import secrets
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from launch import documents
from launch.errors import HostError, TopologyError
from launch.hosts.probe import AT_ONCE, at_once
from launch.hosts.ssh import Ssh
from launch.machine.decode import decode
from launch.process import ask

MARK = "hvdlaunch-connect "
WAIT_S = 12.0  # for the other hosts, which start at other times
GRACE_S, SHORT_S = 1.0, 0.2  # for the other networks, after one has worked, or the first
TRY_S, RETRY_S = 1.0, 0.02  # for one connection; between two
LIMIT_S = WAIT_S + 5.0  # with ssh and the start of Python
NO_ANSWER, ANOTHER = "no answer", "another machine answers"


@dataclass(frozen=True, kw_only=True)
class Way:
    """One network between a host and the next."""

    address: str  # of the host
    next_address: str


@dataclass(frozen=True, kw_only=True)
class ConnectionTrial:
    """The part of one host."""

    nonce: str  # another machine may have an address of the next host, or another run its port
    host: str
    port: int
    next_host: str
    next_port: int
    ways: tuple[Way, ...]


def try_networks(
    networks: Sequence[Mapping[str, str]],
    ports: Mapping[str, int],
    *,
    local: Collection[str],
    ssh: Ssh,
    python: str,
    folder: str,
) -> list[str]:
    """Return for each network, an address of each host, why it does not connect the hosts, or "" if it does.

    The preferred network is first; `ports` has a free port of each host, `local` the hosts that are this machine. On
    each host `python` is started in `folder`. LaunchError if a host no longer responds.
    """
    first, *others = ports
    failures = [""] * len(networks)
    for start in range(0, len(others), AT_ONCE - 1):  # all hosts of a ring must run at the same time
        ring = [first, *others[start : start + AT_ONCE - 1]]
        after = dict(zip(ring, [*ring[1:], first], strict=True))
        nonce = secrets.token_hex(8)
        trials = {
            host: ConnectionTrial(
                nonce=nonce,
                host=host,
                port=ports[host],
                next_host=after[host],
                next_port=ports[after[host]],
                ways=tuple(Way(address=own[host], next_address=own[after[host]]) for own in networks),
            )
            for host in ring
        }

        def part_of(host: str, trials: Mapping[str, ConnectionTrial] = trials) -> tuple[str, ...]:
            words = [python, "-P", "-m", "launch.hosts.connect", json.dumps(asdict(trials[host]))]
            if host not in local:
                return _parsed(ssh.ask(host, words, folder, mark=MARK, timeout_s=LIMIT_S), host, len(networks))
            return _parsed(ask(words, timeout_s=LIMIT_S).out.rpartition(MARK)[2], host, len(networks))

        for host, reasons in at_once(part_of, ring).items():
            for number, why in enumerate(reasons):
                if why and not failures[number]:
                    failures[number] = f"{host} to {after[host]}: {why}"
    return failures


def _parsed(report: str, host: str, count: int) -> tuple[str, ...]:
    with contextlib.suppress(TopologyError, ValueError):
        failures: tuple[str, ...] = decode(documents.parse(report), tuple[str, ...], "its report")
        if len(failures) == count:
            return failures
    raise HostError(f"host {host}: its report about networks cannot be read: install the same version there")


async def connect_to_next(trial: ConnectionTrial) -> list[str]:
    """Listen, and connect to the next host over each network; return why each failed, or "" if it did not."""
    failures = [NO_ANSWER] * len(trial.ways)
    heard: set[str] = set()  # our addresses at which the previous host has connected

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(writer):
            if await reader.readline() == f"{trial.nonce}\n".encode():
                writer.write(f"{trial.nonce} {trial.host} {writer.get_extra_info('peername')[0]}\n".encode())
                await reader.read()  # if the other side closes first, our port is free at once
                heard.add(writer.get_extra_info("sockname")[0])

    async def connect(number: int, way: Way) -> None:
        while failures[number]:
            try:
                async with asyncio.timeout(TRY_S):
                    failures[number] = await greet(trial, way)
            except TimeoutError:
                failures[number] = NO_ANSWER
            except OSError as error:
                failures[number] = os.strerror(error.errno).lower() if error.errno else NO_ANSWER
            await asyncio.sleep(RETRY_S)

    servers = []
    for way in trial.ways:
        with contextlib.suppress(OSError):  # the previous host reports that nothing listens
            servers.append(await asyncio.start_server(answer, way.address, trial.port))
    tasks = [asyncio.create_task(connect(number, way)) for number, way in enumerate(trial.ways)]
    clock = asyncio.get_running_loop().time
    end = clock() + WAIT_S
    while clock() < end and (any(failures) or len(heard) < len(trial.ways)):
        await asyncio.sleep(RETRY_S)
        if heard and not all(failures):
            first_works = not failures[0] and trial.ways[0].address in heard
            end = min(end, clock() + (SHORT_S if first_works else GRACE_S))
    for server in servers:
        server.close()
    for task in tasks:
        task.cancel()
    return failures


async def greet(trial: ConnectionTrial, way: Way) -> str:
    """Connect to the next host from our address on a network; return what is wrong with its answer, or ""."""
    reader, writer = await asyncio.open_connection(way.next_address, trial.next_port, local_addr=(way.address, 0))
    answer: list[str] = []
    with contextlib.closing(writer), contextlib.suppress(ValueError):  # a line without end
        writer.write(f"{trial.nonce}\n".encode())
        answer = (await reader.readline()).decode(errors="replace").split()
    if answer[:2] != [trial.nonce, trial.next_host]:
        return ANOTHER
    return "" if answer[2:] == [way.address] else f"arrives from {' '.join(answer[2:])}, not {way.address}"


if __name__ == "__main__":
    part = decode(documents.parse(sys.argv[1]), ConnectionTrial, "the trial")
    print(f"{MARK}{json.dumps(asyncio.run(connect_to_next(part)))}", flush=True)
