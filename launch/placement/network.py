"""Pure: the network that the hosts of a run share, and each host's interface on it."""

import contextlib
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from ipaddress import IPv4Address, IPv4Interface, IPv4Network

from launch.errors import PlacementError
from launch.hosts.host import shown
from launch.machine.topology import Interface

LOOPBACK = IPv4Network("127.0.0.0/8")
MAX_PREFIX = 31  # Open MPI treats a /32 as all addresses
MAX_NAMED = 8  # hosts in one message
# Interfaces of containers, virtual machines, tunnels and a server's own controller: other hosts are rarely behind them,
# whatever speed they report.
VIRTUAL = re.compile(
    "docker|podman|nerdctl|cni|cali|cilium|flannel|weave|kube|veth|lxc|lxdbr|incusbr|br-|virbr|vnet|vmnet|vboxnet|tap|tun"
    "|wg|tailscale|zt|dummy|usb|idrac"
)
REMEDY = "name a network that is theirs alone with --network CIDR, or an interface that all have with --network NAME"

Hosts = Mapping[str, Sequence[Interface]]  # host -> its interfaces


@dataclass(frozen=True, kw_only=True)
class SharedNetwork:
    """The network that the hosts of a run use."""

    name: str  # in Open MPI's notation: a CIDR, or the name of an interface that every host has
    interfaces: Mapping[str, Interface]  # host -> its interface on this network
    by_ssh: bool = False  # ssh has reached every host at its address on this network
    # The candidates, if there were several: network -> why it was dropped, "" if it connects the hosts.
    tried: Mapping[str, str] = field(default_factory=dict)


def shared_network(
    hosts: Hosts, reached: Mapping[str, str], wanted: str | None = None, tried: Mapping[str, str] | None = None
) -> SharedNetwork:
    """Return the `wanted` network, a CIDR or an interface's name; without one the first candidate that works.

    `tried` has the networks that were tried, with the reason for each that does not connect the hosts.
    PlacementError if no network is shared, it also covers other interfaces, is not the `wanted` one, or none works.
    """
    if wanted is not None:
        return _wanted(hosts, wanted)
    tried = tried or {}
    for network in candidates(hosts, reached):
        if not tried.get(network.name):
            return replace(network, tried=tried if network.name in tried and len(tried) > 1 else {})
    raise PlacementError(f"the hosts do not reach each other: {describe(tried)}: allow TCP between them, or {REMEDY}")


def describe(tried: Mapping[str, str]) -> str:
    """Describe in one line which networks were tried, and why some were dropped."""
    return _short([f"{name} dropped ({why})" if why else f"{name} works" for name, why in tried.items()], ", ")


def candidates(hosts: Hosts, reached: Mapping[str, str]) -> list[SharedNetwork]:
    """Return the networks on which every host has an address, best first, else the smallest that covers one of each.

    The fastest is first if all speeds are known, then the one over which ssh `reached` most hosts (host -> its
    address), then the first of the first host. Virtual interfaces are last, unless ssh reached one. A covering network
    covers the addresses that ssh reached; routers are trusted to forward between them.
    PlacementError if no network is shared, or it also covers other interfaces.
    """
    networks = dict.fromkeys(map(_network, next(iter(hosts.values()))))
    shared = {network: on_it for network in networks if (on_it := _shared_by(hosts, network))}
    if not shared:
        return [_covering(hosts, reached)]
    votes = Counter(network for network in shared for address in reached.values() if IPv4Address(address) in network)
    real = [network for network, on_it in shared.items() if votes[network] or not any(map(_is_virtual, on_it.values()))]
    speeds = {network: [own.speed_mbps for own in shared[network].values()] for network in real}
    known = len(hosts) > 1 and all(None not in of_one for of_one in speeds.values())

    def score(network: IPv4Network) -> tuple[int, int]:
        return min(speed or 0 for speed in speeds[network]) if known else 0, votes[network]

    routed = []
    if reached and not votes:
        with contextlib.suppress(PlacementError):
            routed = [_covering(hosts, reached)]
    real.sort(key=score, reverse=True)  # stable: the first in a tie
    last = [network for network in shared if network not in real]
    before, after = ([_candidate(str(_of_two_or_more(n)), shared[n], reached) for n in some] for some in (real, last))
    return [*before, *routed, *after]


def name_on(interfaces: Sequence[Interface], network: str) -> str | None:
    """Return the name of the interface on the network, which is a CIDR or an interface's name."""
    cidr = _parsed(network)
    return next((interface.name for interface in interfaces if _is_meant(interface, network, cidr)), None)


def network_of(interfaces: Sequence[Interface], address: str) -> str | None:
    """Return the network, as CIDR, of the interface with this address; None if there is none."""
    mine = (_network(interface) for interface in interfaces if str(address_of(interface)) == address)
    return next((str(_of_two_or_more(network)) for network in mine), None)


def address_of(interface: Interface) -> IPv4Address:
    """Return the interface's address."""
    return IPv4Interface(interface.cidr).ip


def _is_virtual(interface: Interface) -> bool:
    return VIRTUAL.match(interface.name) is not None or address_of(interface).is_link_local


def _network(interface: Interface) -> IPv4Network:
    return IPv4Interface(interface.cidr).network


def _candidate(name: str, interfaces: Mapping[str, Interface], reached: Mapping[str, str]) -> SharedNetwork:
    by_ssh = all(str(address_of(interface)) == reached.get(host) for host, interface in interfaces.items())
    return SharedNetwork(name=name, interfaces=interfaces, by_ssh=by_ssh)


def _first(hosts: Hosts, fits: Callable[[str, Interface], bool]) -> dict[str, Interface]:
    """Return each host's first interface that fits; hosts without one are left out."""
    every = {host: next((own for own in interfaces if fits(host, own)), None) for host, interfaces in hosts.items()}
    return {host: interface for host, interface in every.items() if interface is not None}


def _shared_by(hosts: Hosts, network: IPv4Network) -> dict[str, Interface]:
    """Return each host's interface on exactly this network; empty if one has none, or two have the same address."""
    on_it = _first(hosts, lambda _, interface: _network(interface) == network)
    return on_it if len(set(map(address_of, on_it.values()))) == len(hosts) else {}


def _wanted(hosts: Hosts, wanted: str) -> SharedNetwork:
    """Return the network that the user has named."""
    cidr, option = _parsed(wanted), f"--network {shown(wanted)}"
    chosen = _first(hosts, lambda _, interface: _is_meant(interface, wanted, cidr))
    if missing := [host for host in hosts if host not in chosen]:
        have = "has" if len(missing) == 1 else "have"
        raise PlacementError(
            f"{option}: {_short(missing, ', ')} {have} no address there ({_seen(hosts, missing)}): "
            "name a CIDR or an interface on which every host has one"
        )
    if cidr is not None and cidr.overlaps(LOOPBACK):
        raise PlacementError(f"{option} covers the hosts' loopback {LOOPBACK} too: {REMEDY}")
    _require_distinct(chosen, option)
    return SharedNetwork(name=wanted if cidr is None else str(cidr), interfaces=chosen)


def _covering(hosts: Hosts, reached: Mapping[str, str]) -> SharedNetwork:
    """Return the smallest network with an address of each host."""
    chosen = _first(hosts, lambda host, interface: str(address_of(interface)) == reached.get(host))
    chosen |= {host: interfaces[0] for host, interfaces in hosts.items() if len(interfaces) == 1}
    if not chosen or not all(hosts.values()):
        raise PlacementError(f"the hosts share no network: {_seen(hosts, hosts)}: {REMEDY}")
    known = list(map(address_of, chosen.values()))
    nearest = {
        host: min(interfaces, key=lambda interface: _smallest([*known, address_of(interface)]).num_addresses)
        for host, interfaces in hosts.items()
    }
    chosen = {host: chosen.get(host, nearest[host]) for host in hosts}
    _require_distinct(chosen, "the hosts share no network")
    cover = _smallest(list(map(address_of, chosen.values())))
    others = [
        f"{interface.name} {interface.cidr} of {host}"
        for host, interfaces in hosts.items()
        for interface in interfaces
        if interface is not chosen[host] and address_of(interface) in cover
    ]
    if cover.overlaps(LOOPBACK):
        others.append(f"their loopback {LOOPBACK}")
    if others:
        addresses = _short([f"{host} {address_of(chosen[host])}" for host in hosts], ", ")
        raise PlacementError(
            f"the hosts share no network, and the smallest that covers their addresses ({addresses}), {cover}, "
            f"covers {others[0]} too, over which they may not meet: {REMEDY}"
        )
    return _candidate(str(cover), chosen, reached)


def _smallest(addresses: Sequence[IPv4Address]) -> IPv4Network:
    """Return the smallest network with all these addresses, at least two."""
    differing = int(min(addresses)) ^ int(max(addresses))
    return _of_two_or_more(IPv4Network((int(min(addresses)), 32 - differing.bit_length()), strict=False))


def _of_two_or_more(network: IPv4Network) -> IPv4Network:
    return network if network.prefixlen <= MAX_PREFIX else network.supernet(new_prefix=MAX_PREFIX)


def _parsed(text: str) -> IPv4Network | None:
    """Parse a CIDR; return None for anything else, for example an interface's name."""
    try:
        return _of_two_or_more(IPv4Network(text, strict=False))
    except ValueError:
        return None


def _is_meant(interface: Interface, name: str, cidr: IPv4Network | None) -> bool:
    return interface.name == name if cidr is None else address_of(interface) in cidr


def _require_distinct(chosen: Mapping[str, Interface], subject: str) -> None:
    first: dict[IPv4Address, str] = {}
    for host, interface in chosen.items():
        if (other := first.setdefault(address_of(interface), host)) != host:
            raise PlacementError(
                f"{subject}: {other} and {host} have the same address, {address_of(interface)}: {REMEDY}"
            )


def _seen(hosts: Hosts, names: Iterable[str]) -> str:
    """Describe the interfaces of these hosts, for a message."""
    listed = {host: ", ".join(f"{interface.name} {interface.cidr}" for interface in hosts[host]) for host in names}
    return _short([f"{host} has {interfaces or 'no address'}" for host, interfaces in listed.items()], "; ")


def _short(names: Sequence[str], separator: str) -> str:
    """Join the words; a long list is shortened."""
    more = [] if len(names) <= MAX_NAMED else [f"and {len(names) - MAX_NAMED} more"]
    return separator.join([*names[:MAX_NAMED], *more])
