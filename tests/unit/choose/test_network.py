import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launch.choose.network import name_on, network_of, shared_network
from launch.errors import PlacementError
from launch.machine.topology import Interface


def interfaces(**cidrs):
    return [Interface(name=name, cidr=cidr) for name, cidr in cidrs.items()]


CLUSTER = {
    "h1": interfaces(docker0="172.17.0.1/16", eth0="10.0.0.1/24", ib0="192.168.1.1/24"),
    "h2": interfaces(ens5="10.0.0.2/24", docker0="172.17.0.1/16", ib0="192.168.1.2/24"),
    "h3": interfaces(eno1="10.0.0.3/24", ib1="192.168.1.3/24", docker0="172.17.0.1/16"),
}


def test_a_docker0_with_the_same_address_everywhere_is_no_shared_network():
    assert shared_network(CLUSTER, {}) == "10.0.0.0/24"  # the first of the first host that is


def test_the_network_wins_over_which_ssh_reached_the_hosts():
    reached = {"h1": "192.168.1.1", "h2": "192.168.1.2", "h3": "10.0.0.3"}
    assert shared_network(CLUSTER, reached) == "192.168.1.0/24"
    assert shared_network(CLUSTER, {"h1": "203.0.113.5"}) == "10.0.0.0/24"  # a network of the login node alone


def test_each_host_has_its_own_name_for_its_interface():
    assert [name_on(own, "10.0.0.0/24") for own in CLUSTER.values()] == ["eth0", "ens5", "eno1"]
    assert name_on(CLUSTER["h1"], "10.0.1.0/24") is None


def test_networks_of_different_size_are_different():
    apart = {"h1": interfaces(eth0="10.0.0.1/24"), "h2": interfaces(eth0="10.0.0.2/16")}
    with pytest.raises(PlacementError, match=r"h1 has eth0 10\.0\.0\.1/24; h2 has eth0 10\.0\.0\.2/16"):
        shared_network(apart, {})


def test_hosts_without_a_shared_network_are_refused_with_what_they_have():
    with pytest.raises(PlacementError) as refused:
        shared_network(
            {"h1": interfaces(docker0="172.17.0.1/16"), "h2": interfaces(docker0="172.17.0.1/16"), "h3": []}, {}
        )
    assert str(refused.value) == (
        "the hosts share no network: h1 has docker0 172.17.0.1/16; h2 has docker0 172.17.0.1/16; h3 has no address. "
        "Give hosts that are on one network"
    )


def test_the_network_of_an_address():
    assert network_of(CLUSTER["h1"], "192.168.1.1") == "192.168.1.0/24"
    assert network_of(CLUSTER["h1"], "192.168.1.2") is None


@given(st.data())
def test_whatever_is_found_all_hosts_are_on_it_each_with_its_own_address(data):
    cidrs = st.builds("10.{}.0.{}/{}".format, st.integers(0, 1), st.integers(1, 3), st.sampled_from([16, 24]))
    hosts = data.draw(st.lists(st.lists(cidrs, max_size=4), min_size=2, max_size=4))
    known = {
        f"h{i}": [Interface(name=f"e{i}{j}", cidr=cidr) for j, cidr in enumerate(own)] for i, own in enumerate(hosts)
    }
    on = [{ipaddress.ip_interface(cidr).network for cidr in own} for own in hosts]

    def proper(network):
        addresses = [
            cidr.split("/")[0] for own in hosts for cidr in own if ipaddress.ip_interface(cidr).network == network
        ]
        return len(addresses) == len(set(addresses))

    possible = {str(network) for network in set.intersection(*on) if proper(network)}
    try:
        found = shared_network(known, {})
    except PlacementError:
        assert not possible
    else:
        assert found in possible
        assert all(name_on(own, found) is not None for own in known.values())
