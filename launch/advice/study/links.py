"""Pure: measured speeds of hosts, between hosts and between GPUs, and those below the others of their kind."""

import statistics
from collections.abc import Collection, Hashable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from launch.machine.show.table import aligned, link_word
from launch.machine.topology import Topology, position
from launch.placement import allreduce
from launch.placement.allreduce import ComparedSums
from launch.placement.findings import Finding
from launch.placement.measured import GpuLinks

BELOW = 2 / 3  # a host, pair or link is slow below this share of its peers
COLUMNS = tuple(2**power for power in (16, 20, 22, 24, 26, 28))  # bytes
Node = TypeVar("Node", bound=Hashable)
Edge = tuple[Node, Node]


@dataclass(frozen=True, kw_only=True)
class LinkSpeed:
    """The speed of sums or exchanges of one size."""

    bytes: int
    median_s: float
    gb_per_s: float  # of a sum on its bus, of an exchange one way


Speeds = tuple[LinkSpeed, ...]  # of one host, pair or link, smallest size first


@dataclass(kw_only=True)
class Bandwidth:
    """All measurements."""

    topologies: Mapping[str, Topology]
    hosts: dict[str, Speeds] = field(default_factory=dict)  # sums over the ranks of a host
    pairs: dict[tuple[str, str], Speeds] = field(default_factory=dict)  # between the first ranks of two hosts
    links: dict[str, dict[tuple[int, int], Speeds]] = field(default_factory=dict)  # between two GPUs, by host, indices
    over_all: Speeds = ()  # sums over all ranks of several hosts; empty for one host
    nccl: list[str] = field(default_factory=list)  # NCCL's behaviour in each job, if its log was requested
    sums: ComparedSums | None = None  # several algorithms over all ranks, if they were compared


def from_report(report: Mapping[str, Any]) -> tuple[Speeds, dict[tuple[int, int], Speeds]]:
    """Return the sums, and the exchanges by ranks, of a report of hvdtrain.bandwidth --json."""
    pairs: dict[tuple[int, int], Speeds] = {}
    for line in report["pairs"]:
        rank, other = line["ranks"]
        pairs[rank, other] = (*pairs.get((rank, other), ()), _speed(line, "gb_per_s"))
    return tuple(_speed(line, "bus_gb_per_s") for line in report["measured"]), pairs


def _speed(line: Mapping[str, Any], key: str) -> LinkSpeed:
    return LinkSpeed(bytes=line["bytes"], median_s=line["median_s"], gb_per_s=line[key])


def slow_ones(measured: Bandwidth) -> list[Finding]:
    """Return the slow hosts, pairs and links."""
    return [*_slow_hosts(measured), *_slow_pairs(measured), *_slow_links(measured)]


def _slow(host: str, problem: str, remedy: str) -> Finding:
    return Finding(severity="warning", hosts=(host,), about="bandwidth", problem=problem, remedy=remedy)


def _slow_hosts(measured: Bandwidth) -> Iterator[Finding]:
    size, reached = _at_one_size(measured.hosts)
    for host, gbps in reached.items() if len(reached) > 1 else ():
        if gbps < BELOW * (usual := statistics.median(reached.values())):
            yield _slow(
                host,
                f"its own ranks sum {_named(size)} at {gbps:.3g} GB/s, the median of all hosts is {usual:.3g}",
                "see what else runs there (top, nvidia-smi), its clocks, and whether its GPUs are the same",
            )


def _slow_pairs(measured: Bandwidth) -> Iterator[Finding]:
    """Yield hosts that are slow with every other host, and other slow pairs."""
    size, reached = _at_one_size(measured.pairs)
    best = best_of(reached)
    usual = statistics.median(best.values()) if best else 0.0
    hosts, rest = slow_endpoints({pair for pair, gbps in reached.items() if gbps < BELOW * usual}, reached)
    for host in hosts:
        yield _slow(
            host,
            f"with every other host it exchanges {_named(size)} at {best[host]:.3g} GB/s or less, others reach "
            f"{usual:.3g}",
            "see the speed of its interface (ethtool), its cable and port, and who else uses its network",
        )
    for first, second in rest:
        yield _slow(
            first,
            f"with {second} it exchanges {_named(size)} at {reached[first, second]:.3g} GB/s, others reach {usual:.3g}",
            f"see the way between the two (traceroute, MTU, switch), or leave out {first} or {second}",
        )


def _slow_links(measured: Bandwidth) -> Iterator[Finding]:
    """Yield GPUs with links that are all below the median of their kind on all hosts, and other such links."""
    all_links = {(host, pair): speeds for host, own in measured.links.items() for pair, speeds in own.items()}
    size, all_reached = _at_one_size(all_links)
    kinds = {(host, pair): _kind(measured.topologies[host], *pair) for host, pair in all_reached}
    alike: dict[str, list[float]] = {}
    for key, gbps in all_reached.items():
        alike.setdefault(kinds[key], []).append(gbps)
    usual = {key: statistics.median(alike[kind]) for key, kind in kinds.items()}
    for host, own in measured.links.items():
        reached = {pair: all_reached[host, pair] for pair in own}
        slow = {pair for pair, gbps in reached.items() if gbps < BELOW * usual[host, pair]}
        gpus, rest = slow_endpoints(slow, reached)
        for gpu in gpus:
            yield _slow(
                host,
                f"every link of GPU {gpu} is slower than its like, at most {best_of(reached)[gpu]:.3g} GB/s at "
                f"{_named(size)}",
                f"see its PCIe width and NVLinks (nvidia-smi -q -i {gpu}, nvidia-smi nvlink -s -i {gpu}), or "
                "leave it out with --gpus",
            )
        for a, b in rest:
            yield _slow(
                host,
                f"GPUs {a} and {b} exchange {_named(size)} at {reached[a, b]:.3g} GB/s, links of the same kind "
                f"({kinds[host, (a, b)]}) {usual[host, (a, b)]:.3g}",
                f"see nvidia-smi nvlink -s -i {a} and nvidia-smi topo -p2p r; --measured FILE chooses around it",
            )


def best_of(reached: Mapping[Edge[Node], float]) -> dict[Node, float]:
    """Return the best GB/s of each end, which one slow host does not change for the others."""
    best: dict[Node, float] = {}
    for pair, gbps in reached.items():
        best |= {node: max(gbps, best.get(node, 0)) for node in pair}
    return best


def slow_endpoints(slow: Collection[Edge[Node]], pairs: Collection[Edge[Node]]) -> tuple[list[Node], list[Edge[Node]]]:
    """Return the endpoints with several pairs, all slow, and the slow pairs without these endpoints."""
    own: dict[Node, list[bool]] = {}
    for pair in pairs:
        for node in pair:
            own.setdefault(node, []).append(pair in slow)
    nodes = [node for node, slows in own.items() if len(slows) > 1 and all(slows)]
    return nodes, [pair for pair in pairs if pair in slow and not set(pair) & set(nodes)]


def _at_one_size(measured: Mapping[Node, Speeds]) -> tuple[int, dict[Node, float]]:
    """Return the largest size that was measured for all, and the GB/s of each at that size."""
    sizes = [{speed.bytes for speed in speeds} for speeds in measured.values()]
    size = max(set.intersection(*sizes), default=0) if sizes else 0
    return size, {key: speed.gb_per_s for key, speeds in measured.items() for speed in speeds if speed.bytes == size}


def _kind(topology: Topology, a: int, b: int) -> str:
    return link_word(topology.links[position(topology, a)][position(topology, b)])


def _named(size: int) -> str:
    unit, count = next(((unit, size >> bits) for unit, bits in (("MB", 20), ("KB", 10)) if size >> bits), ("B", size))
    return f"{count}{unit}"


def gpu_links(measured: Bandwidth) -> tuple[GpuLinks, ...]:
    """Return the matrix of each host with several GPUs, at the largest size common to its links."""
    hosts = []
    for host, own in measured.links.items():
        _, reached = _at_one_size(own)
        gpus = sorted({gpu for pair in own for gpu in pair})
        uuids = {gpu.index: gpu.uuid for gpu in measured.topologies[host].gpus}
        rows = tuple(tuple(None if a == b else reached[min(a, b), max(a, b)] for b in gpus) for a in gpus)
        hosts.append(GpuLinks(host=host, gpus=tuple(gpus), uuids=tuple(uuids[gpu] for gpu in gpus), gb_per_s=rows))
    return tuple(hosts)


def bandwidth_table(measured: Bandwidth) -> str:
    """Format latency and GB/s of hosts, pairs and all together, and the GPU matrix."""
    rows = [["GB/s", "latency", *map(_named, COLUMNS)]]
    rows += [_row(f"on {host}", speeds) for host, speeds in measured.hosts.items()]
    rows += [_row(f"{host} and {other}", speeds) for (host, other), speeds in measured.pairs.items()]
    rows += [_row("over all", measured.over_all)] if measured.over_all else []
    blocks = [aligned(rows)] if len(rows) > 1 else []
    for links in gpu_links(measured):
        cells = [["-" if speed is None else f"{speed:.1f}" for speed in row] for row in links.gb_per_s]
        names = [f"GPU{gpu}" for gpu in links.gpus]
        blocks.append(aligned([[links.host, *names], *([name, *row] for name, row in zip(names, cells, strict=True))]))
    blocks += [] if measured.sums is None else [allreduce.table(measured.sums)]
    return "\n\n".join([*blocks, *measured.nccl])


def _row(what: str, speeds: Speeds) -> list[str]:
    at = {speed.bytes: speed for speed in speeds}
    latency = f"{speeds[0].median_s * 1e3:.3f} ms" if speeds else "-"
    return [what, latency, *(f"{at[size].gb_per_s:.3g}" if size in at else "-" for size in COLUMNS)]


def bandwidth_json(measured: Bandwidth) -> dict[str, Any]:
    """Return the measurements for programs; --measured reads `gpu_links`."""
    return {
        "hosts": {host: list(map(asdict, speeds)) for host, speeds in measured.hosts.items()},
        "pairs": [{"hosts": pair, "speeds": list(map(asdict, speeds))} for pair, speeds in measured.pairs.items()],
        "over_all": list(map(asdict, measured.over_all)),
        "gpu_links": list(map(asdict, gpu_links(measured))),
        **({} if measured.sums is None else {"sums": asdict(measured.sums)}),
    }
