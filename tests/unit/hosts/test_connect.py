"""Connections between hosts, here between addresses of this machine: 127.0.0.0/8 has room for several hosts."""

import asyncio
import contextlib
import json
import socket
from collections import Counter
from dataclasses import replace

import pytest

from launch.errors import HostError
from launch.hosts import connect
from launch.hosts.connect import ANOTHER, NO_ANSWER, ConnectionTrial, Way, connect_to_next, try_networks
from launch.hosts.probe import AT_ONCE
from launch.machine.system import free_port

A, B, OTHER_A, OTHER_B = "127.0.0.1", "127.0.0.2", "127.0.1.1", "127.0.1.2"


def trials(*networks):
    """The parts of hosts a and b, which have these addresses on each network."""
    a = ConnectionTrial(nonce="n0nce", host="a", port=free_port(), next_host="b", next_port=free_port(), ways=())
    b = replace(a, host="b", port=a.next_port, next_host="a", next_port=a.port)
    return [
        replace(part, ways=tuple(Way(address=own[number], next_address=own[1 - number]) for own in networks))
        for number, part in enumerate((a, b))
    ]


def both(*parts):
    async def connected():
        return await asyncio.gather(*map(connect_to_next, parts))

    return asyncio.run(connected())


def test_hosts_connect_over_each_network_and_leave_their_port_free():
    parts = trials((A, B), (OTHER_A, OTHER_B))
    assert both(*parts) == [["", ""], ["", ""]]
    with socket.socket() as trial:
        trial.bind((A, parts[0].port))  # without SO_REUSEADDR: no connection of it is left


def test_a_network_that_carries_one_direction_only_does_not_connect_hosts(monkeypatch):
    monkeypatch.setattr(connect, "SHORT_S", 0.05)
    a, b = trials((A, B), (OTHER_A, OTHER_B))
    deaf = replace(b, ways=(b.ways[0], replace(b.ways[1], address="192.0.2.1")))  # not an address of this machine
    (of_a, of_b) = both(a, deaf)
    assert (of_a, of_b[0]) == (["", "connection refused"], "")
    assert of_b[1]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (b"n0nce b 127.0.0.1\n", ""),
        (b"n0nce b 10.0.0.9\n", "arrives from 10.0.0.9, not 127.0.0.1"),  # translated, or by another interface
        (b"n0nce c 127.0.0.1\n", ANOTHER),  # another host of the run
        (b"n0nce\n", ANOTHER),  # an echo
        (b"SSH-2.0-OpenSSH_9.2\r\n", ANOTHER),
        (b"\xff" * 70_000, ANOTHER),
        (b"", ANOTHER),
    ],
)
def test_only_the_next_host_itself_counts(answer, why):
    async def against():
        async def stranger(reader, writer):
            with contextlib.closing(writer):
                asked.append(await reader.readline())
                writer.write(answer)

        async with await asyncio.start_server(stranger, B, part.next_port):
            return await connect.greet(part, part.ways[0])

    asked, (part, _) = [], trials((A, B))
    assert asyncio.run(against()) == why
    assert asked == [b"n0nce\n"]


def test_a_silent_network_ends_with_a_limit_and_without_one_that_works_so_does_the_trial(monkeypatch):
    for limit in ("WAIT_S", "TRY_S"):
        monkeypatch.setattr(connect, limit, 0.1)
    part, _ = trials((A, B))
    with socket.create_server((B, part.next_port)):  # it accepts, and says nothing, like a firewall
        assert asyncio.run(connect_to_next(part)) == [NO_ANSWER]


class Hosts:
    """Hosts that answer over no ssh; `failures` has (from, to, network) -> why."""

    def __init__(self, failures=None):
        self.failures, self.parts = failures or {}, {}

    def ask(self, host, words, folder, *, mark, timeout_s):
        part = json.loads(words[-1])
        self.parts.setdefault(host, []).append(part)
        after = part["next_host"]
        return json.dumps([self.failures.get((host, after, n), "") for n in range(len(part["ways"]))])


def tried(ssh, count, networks=2):
    names = [f"h{i}" for i in range(count)]
    addresses = [{name: f"10.{n}.0.{i}" for i, name in enumerate(names)} for n in range(networks)]
    ports = {name: 20_000 + i for i, name in enumerate(names)}
    return try_networks(addresses, ports, local=(), ssh=ssh, python="python", folder="/")


def test_the_first_two_hosts_that_do_not_connect_are_named():
    assert tried(Hosts({("h2", "h0", 1): NO_ANSWER}), 3) == ["", "h2 to h0: no answer"]


@pytest.mark.parametrize(("count", "most"), [(2, 1), (64, 1), (200, 4)])
def test_each_host_connects_to_one_other(count, most):
    ssh = Hosts()
    assert tried(ssh, count) == ["", ""]
    sent = [(part["host"], part["next_host"]) for parts in ssh.parts.values() for part in parts]
    assert {host for host, _ in sent} == {f"h{i}" for i in range(count)}
    assert len(sent) == len(set(sent)) < count + most
    rings = {part["nonce"] for parts in ssh.parts.values() for part in parts}
    assert len(rings) == most
    assert len(ssh.parts["h0"]) == most  # it is in all rings, which so are one network
    assert max(Counter(part["nonce"] for parts in ssh.parts.values() for part in parts).values()) <= AT_ONCE


@pytest.mark.parametrize("report", ["", "[]", '["", 1]', "{}", "nonsense"])
def test_a_report_of_another_form_names_its_host(report):
    ssh = Hosts()
    ssh.ask = lambda host, *_, **__: report if host == "h1" else '["", ""]'
    with pytest.raises(HostError, match=r"^host h1: its report about networks cannot be read: install"):
        tried(ssh, 2)
