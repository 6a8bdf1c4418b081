import re

import pytest

from launch.errors import PlacementError
from launch.machine.topology import Interface
from launch.placement.network import MAX_NAMED, candidates, shared_network
from tests.unit.machines import refusal_of


def interfaces(**cidrs):
    """Interfaces by name; a speed in Mb/s stands behind the address."""
    parts = [(name, *cidr.partition(" ")) for name, cidr in cidrs.items()]
    return [Interface(name=name, cidr=cidr, speed_mbps=int(speed) if speed else None) for name, cidr, _, speed in parts]


CLUSTER = {
    "h1": interfaces(docker0="172.17.0.1/16", eth0="10.0.0.1/24", ib0="192.168.1.1/24"),
    "h2": interfaces(ens5="10.0.0.2/24", docker0="172.17.0.1/16", ib0="192.168.1.2/24"),
    "h3": interfaces(eno1="10.0.0.3/24", ib1="192.168.1.3/24", docker0="172.17.0.1/16"),
}
CLOUD_REACHED = {"h1": "10.128.0.5", "h2": "10.128.0.9"}
CLOUD = {host: interfaces(ens4=f"{ip}/32", docker0="172.17.0.1/16") for host, ip in CLOUD_REACHED.items()}
RACKS = {f"h{i}": interfaces(eth0=f"10.1.{i}.20/24", docker0="172.17.0.1/16") for i in (1, 2, 3)}  # a network each
PODS = {"h1": interfaces(eth0="10.244.1.5/24", cni0="10.244.3.1/24"), "h2": interfaces(eth0="10.244.2.7/24")}


def found(hosts, reached=(), wanted=None):
    """The network's name, and each host's interface on it."""
    network = shared_network(hosts, dict(reached), wanted)
    return network.name, [network.interfaces[host].name for host in hosts]


def refused(hosts, reached=(), wanted=None):
    return refusal_of(PlacementError, lambda: shared_network(hosts, dict(reached), wanted))


USB = {f"h{i}": interfaces(enx02=f"169.254.0.{i}/16 10000", eth0=f"10.0.0.{i}/24 1000") for i in (1, 2)}
BY_IB = {"h1": "192.168.1.1", "h2": "192.168.1.2", "h3": "10.0.0.3"}
ALONE = {"h1": interfaces(docker0="172.17.0.1/16 10000", eth0="10.0.0.1/24 1000")}
LAN, IB = ("eth0", "ens5", "eno1"), ("ib0", "ib0", "ib1")


@pytest.mark.parametrize(
    ("hosts", "reached", "wanted", "network", "names"),
    [
        (CLUSTER, {}, None, "10.0.0.0/24", LAN),  # the first; the address of docker0 is the same everywhere
        (CLUSTER, BY_IB, None, "192.168.1.0/24", IB),  # over which ssh reached the hosts
        (CLUSTER, {"h1": "203.0.113.5"}, None, "10.0.0.0/24", LAN),  # a network of the login node alone
        (USB, {}, None, "10.0.0.0/24", ["eth0"] * 2),  # a server's controller gives its USB interface such an address
        # One host meets itself where ssh reached it.
        (ALONE, {"h1": "10.0.0.1"}, None, "10.0.0.0/24", ["eth0"]),
        ({"h1": CLOUD["h1"]}, CLOUD_REACHED, None, "10.128.0.4/31", ["ens4"]),
        # Hosts without a shared network meet on the smallest that covers them.
        (CLOUD, {"h2": "10.128.0.9"}, None, "10.128.0.0/28", ["ens4"] * 2),  # the other's nearest address
        (RACKS, {f"h{i}": f"10.1.{i}.20" for i in (1, 2, 3)}, None, "10.1.0.0/22", ["eth0"] * 3),
        ({**PODS, "h1": PODS["h1"][:1]}, {"h1": "127.0.0.1"}, None, "10.244.0.0/22", ["eth0"] * 2),  # ssh in a tunnel
        # The user may name it.
        (CLUSTER, CLOUD_REACHED, "192.168.1.77/24", "192.168.1.0/24", IB),
        (CLOUD, CLOUD_REACHED, "ens4", "ens4", ["ens4"] * 2),
        ({"h1": CLOUD["h1"]}, CLOUD_REACHED, "10.128.0.5", "10.128.0.4/31", ["ens4"]),
        (PODS, {}, "eth0", "eth0", ["eth0"] * 2),
    ],
)
def test_where_hosts_meet(hosts, reached, wanted, network, names):
    assert found(hosts, reached, wanted) == (network, [*names])


@pytest.mark.parametrize(
    ("eth", "ib", "name"),
    [
        (("1000", "1000"), ("100000", "100000"), "192.168.1.0/24"),
        (("1000", "1000"), ("100000", "100"), "10.0.0.0/24"),  # as fast as the slowest host on it
        (("1000", "1000"), ("", "100000"), "10.0.0.0/24"),  # unknown: the one that ssh reached
        (("", ""), ("100000", "100000"), "10.0.0.0/24"),
    ],
)
def test_the_fastest_network_wins(eth, ib, name):
    own = [interfaces(ib0=f"192.168.1.{i}/24 {ib[i - 1]}", eth0=f"10.0.0.{i}/24 {eth[i - 1]}") for i in (1, 2)]
    hosts = dict(zip(("h1", "h2"), own, strict=True))
    assert found(hosts, {"h1": "10.0.0.1", "h2": "10.0.0.2"})[0] == name


VIRTUAL = ("docker0", "virbr0", "usb0", "podman1", "cni0", "veth1a2b", "br-4f2e", "lxdbr0", "flannel.1", "tun0", "wg0")


@pytest.mark.parametrize("name", VIRTUAL)
def test_the_speed_of_a_virtual_interface_does_not_count(name):
    """Each host has an address of its own on it, such as behind bridges that were set up by hand."""
    hosts = {f"h{i}": interfaces(**{name: f"172.20.0.{i}/16 10000"}, eth0=f"10.0.0.{i}/24 1000") for i in (1, 2)}
    assert found(hosts) == ("10.0.0.0/24", ["eth0", "eth0"])
    assert found(hosts, {"h1": "10.0.0.1", "h2": "10.0.0.2"})[0] == "10.0.0.0/24"
    assert found(hosts, {"h1": "172.20.0.1", "h2": "172.20.0.2"})[0] == "172.20.0.0/16"  # a network between hosts
    fast = {host: [*own, *interfaces(ib0=f"192.168.1.{host[1]}/24 100000")] for host, own in hosts.items()}
    assert found(fast, {"h1": "10.0.0.1", "h2": "10.0.0.2"})[0] == "192.168.1.0/24"  # and hides no other speed
    one_sided = {"h1": hosts["h1"], "h2": interfaces(ens1="172.20.0.2/16 10000", eth0="10.0.0.2/24 1000")}
    assert found(one_sided)[0] == "10.0.0.0/24"


def test_the_way_of_ssh_through_a_router_is_better_than_a_virtual_network_and_tried_after_a_real_one():
    def behind_a_router(*own):
        name, cidr = own
        there = {f"h{i}": {name: cidr.format(i), "eth0": f"10.1.{i}.20/24 1000"} for i in (1, 2)}
        tried = candidates({host: interfaces(**nics) for host, nics in there.items()}, reached)
        return [(one.name, one.by_ssh) for one in tried]

    reached = {"h1": "10.1.1.20", "h2": "10.1.2.20"}
    virtual, real = ("192.168.122.0/24", False), ("192.168.1.0/24", False)
    assert behind_a_router("virbr0", "192.168.122.{}/24 10000") == [("10.1.0.0/22", True), virtual]
    assert behind_a_router("ib0", "192.168.1.{}/24 10000") == [real, ("10.1.0.0/22", True)]


def test_a_network_that_does_not_connect_the_hosts_is_dropped():
    reached = {"h1": "10.0.0.1", "h2": "10.0.0.2", "h3": "10.0.0.3"}
    by_ssh = {one.name: one.by_ssh for one in candidates(CLUSTER, reached)}
    assert [*by_ssh.items()] == [("10.0.0.0/24", True), ("192.168.1.0/24", False)]
    tried = {"10.0.0.0/24": "h1 to h2: no answer", "192.168.1.0/24": ""}
    network = shared_network(CLUSTER, reached, None, tried)
    assert (network.name, network.tried) == ("192.168.1.0/24", tried)
    dropped = "10.0.0.0/24 dropped (h1 to h2: no answer), 192.168.1.0/24 dropped (h3 to h1: refused)"
    line = f"the hosts do not reach each other: {dropped}: allow TCP between them, or name a network"
    with pytest.raises(PlacementError, match=re.escape(line)):
        shared_network(CLUSTER, reached, None, {**tried, "192.168.1.0/24": "h3 to h1: refused"})
    assert shared_network(CLUSTER, reached, "10.0.0.0/24", tried).name == "10.0.0.0/24"  # the user's word


def test_a_covering_network_holds_no_other_interface():
    assert refused(PODS, {"h1": "10.244.1.5", "h2": "10.244.2.7"}) == (
        "the hosts share no network, and the smallest that covers their addresses (h1 10.244.1.5, h2 10.244.2.7), "
        "10.244.0.0/22, covers cni0 10.244.3.1/24 of h1 too, over which they may not meet: name a network that is "
        "theirs alone with --network CIDR, or an interface that all have with --network NAME"
    )
    apart = {"h1": interfaces(a="10.0.0.1/24"), "h2": interfaces(b="172.31.0.1/24")}
    assert "0.0.0.0/0, covers their loopback 127.0.0.0/8 too" in refused(apart)


def test_hosts_that_cannot_meet_are_refused_with_what_they_have():
    alike = refused(dict.fromkeys(("h1", "h2"), interfaces(docker0="172.17.0.1/16")))
    assert alike.startswith("the hosts share no network: h1 and h2 have the same address, 172.17.0.1: name a network")
    line = refused({f"h{i}": [] for i in range(MAX_NAMED + 2)})
    assert f"; h{MAX_NAMED - 1} has no address; and 2 more: name" in line


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("ib0", "--network 'ib0': h3 has no address there (h3 has eno1 10.0.0.3/24, ib1 192.168.1.3/24, docker0"),
        ("10.9.0.0/16", "--network '10.9.0.0/16': h1, h2, h3 have no address there (h1 has docker0"),
        ("docker0", "--network 'docker0': h1 and h2 have the same address, 172.17.0.1: name a network that"),
        ("0.0.0.0/0", "--network '0.0.0.0/0' covers the hosts' loopback 127.0.0.0/8 too: name a network that"),
        ("a\x1b[2J", "--network 'a\\x1b[2J': h1, h2, h3 have no address there"),
    ],
)
def test_a_network_that_is_not_everyones_is_refused_with_the_hosts_that_lack_it(wanted, message):
    assert message in refused(CLUSTER, wanted=wanted)
