"""Pure: the network that the hosts of a run share, and each host's interface on it."""

from collections import Counter
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from launch.errors import PlacementError
from launch.machine.topology import Interface

LOOPBACK = "127.0.0.0/8"


def shared_network(interfaces: Mapping[str, Sequence[Interface]], reached: Mapping[str, str]) -> str:
    """The network, as CIDR, on which every host has an address of its own; PlacementError if there is none.

    A docker0 with the same address on every host does not count. Of several networks it is the one over which ssh
    `reached` most hosts (host -> its address there), then the first one of the first host.
    """
    first, *others = interfaces
    shared = [
        network
        for network in map(_network, interfaces[first])
        if all(_on(interfaces[host], network) for host in others) and _addresses_differ(interfaces, network)
    ]
    if not shared:
        seen = "; ".join(
            f"{host} has {', '.join(f'{interface.name} {interface.cidr}' for interface in own) or 'no address'}"
            for host, own in interfaces.items()
        )
        raise PlacementError(f"the hosts share no network: {seen}. Give hosts that are on one network")
    votes = Counter(network for network in shared for address in reached.values() if IPv4Address(address) in network)
    return str(max(shared, key=lambda network: votes[network]))  # of equals the first


def name_on(interfaces: Sequence[Interface], network: str) -> str | None:
    """The name of the interface that is on the network."""
    return next((interface.name for interface in interfaces if _network(interface) == IPv4Network(network)), None)


def network_of(interfaces: Sequence[Interface], address: str) -> str | None:
    """The network, as CIDR, of the interface that has this address; None if none has."""
    found = (str(_network(interface)) for interface in interfaces if str(_address(interface)) == address)
    return next(found, None)


def _network(interface: Interface) -> IPv4Network:
    return IPv4Interface(interface.cidr).network


def _address(interface: Interface) -> IPv4Address:
    return IPv4Interface(interface.cidr).ip


def _on(interfaces: Sequence[Interface], network: IPv4Network) -> bool:
    return any(_network(interface) == network for interface in interfaces)


def _addresses_differ(interfaces: Mapping[str, Sequence[Interface]], network: IPv4Network) -> bool:
    on_it = [interface for own in interfaces.values() for interface in own if _network(interface) == network]
    addresses = [_address(interface) for interface in on_it]
    return len(addresses) == len(set(addresses))
