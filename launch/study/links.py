"""Pure: measured speeds of hosts, between hosts and between GPUs, and those below the others of their kind."""

import statistics
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from launch.machine.show.table import aligned, link_word
from launch.machine.topology import Topology, position
from launch.placement import allreduce
from launch.placement.allreduce import ComparedSums
from launch.placement.findings import Finding
from launch.placement.measured import GpuLinks, gains, with_measured

BELOW = 2 / 3  # a host, pair or link is slow below this share of its peers
COLUMNS = {2**16: "64KB", 2**20: "1MB", 2**22: "4MB", 2**24: "16MB", 2**26: "64MB", 2**28: "256MB"}
Node = TypeVar("Node", str, int)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """The speed of sums or exchanges of one size."""

    bytes: int
    median_s: float
    gb_per_s: float  # of a sum on its bus, of an exchange one way


Speeds = tuple[Speed, ...]  # of one host, pair or link, smallest size first


@dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """All measurements."""

    hosts: Mapping[str, Speeds]  # sums over the ranks of a host
    pairs: Mapping[tuple[str, str], Speeds]  # exchanges between the first ranks of two hosts
    links: Mapping[str, Mapping[tuple[int, int], Speeds]]  # exchanges between two GPUs, by host and indices
    over_all: Speeds  # sums over all ranks of several hosts; empty for one host
    topologies: Mapping[str, Topology]
    nccl: tuple[str, ...] = ()  # NCCL's behaviour in each job, if its log was requested
    sums: ComparedSums | None = None  # several algorithms over all ranks, if they were compared


def from_report(report: Mapping[str, Any]) -> tuple[Speeds, dict[tuple[int, int], Speeds]]:
    """Return the sums, and the exchanges by ranks, of a report of hvdtrain.bandwidth --json.

    KeyError, TypeError or ValueError if it is malformed.
    """
    sums = tuple(_speed(line, line["bus_gb_per_s"]) for line in report["measured"])
    pairs: dict[tuple[int, int], Speeds] = {}
    for line in report["pairs"]:
        rank, other = line["ranks"]
        pairs[rank, other] = (*pairs.get((rank, other), ()), _speed(line, line["gb_per_s"]))
    return sums, pairs


def _speed(line: Mapping[str, Any], gb_per_s: float) -> Speed:
    return Speed(bytes=int(line["bytes"]), median_s=float(line["median_s"]), gb_per_s=float(gb_per_s))


def slow_ones(measured: Bandwidth) -> list[Finding]:
    """Return the slow hosts, pairs and links."""
    return _slow_hosts(measured) + _slow_pairs(measured) + _slow_links(measured)


def _slow(host: str, problem: str, remedy: str) -> Finding:
    return Finding(severity="warning", hosts=(host,), about="bandwidth", problem=problem, remedy=remedy)


def _slow_hosts(measured: Bandwidth) -> list[Finding]:
    size, reached = _at_one_size(measured.hosts)
    if len(reached) < 2:
        return []
    usual = statistics.median(reached.values())
    return [
        _slow(
            host,
            f"its own ranks sum {_named(size)} at {gbps:.3g} GB/s, the median of all hosts is {usual:.3g}",
            "see what else runs there (top, nvidia-smi), its clocks, and whether its GPUs are the same",
        )
        for host, gbps in reached.items()
        if gbps < BELOW * usual
    ]


def _slow_pairs(measured: Bandwidth) -> list[Finding]:
    """Return hosts that are slow with every other host, and other slow pairs."""
    size, reached = _at_one_size(measured.pairs)
    # The best of each host: with one slow host, most pairs of three hosts are slow, but not the best of the others.
    best: dict[str, float] = {}
    for pair, gbps in reached.items():
        best |= {host: max(gbps, best.get(host, 0)) for host in pair}
    if not best:
        return []
    usual = statistics.median(best.values())
    slow = {pair for pair, gbps in reached.items() if gbps < BELOW * usual}
    hosts, rest = slow_endpoints(slow, reached)
    return [
        _slow(
            host,
            f"with every other host it exchanges {_named(size)} at {best[host]:.3g} GB/s or less, others reach "
            f"{usual:.3g}",
            "see the speed of its interface (ethtool), its cable and port, and who else uses its network",
        )
        for host in hosts
    ] + [
        _slow(
            first,
            f"with {second} it exchanges {_named(size)} at {reached[first, second]:.3g} GB/s, others reach {usual:.3g}",
            f"see the way between the two (traceroute, MTU, switch), or leave out {first} or {second}",
        )
        for first, second in rest
    ]


def _slow_links(measured: Bandwidth) -> list[Finding]:
    """Return GPUs with links that are all below the median of their kind on all hosts, and other such links."""
    all_links = {(host, *pair): speeds for host, own in measured.links.items() for pair, speeds in own.items()}
    size, reached = _at_one_size(all_links)
    kinds = {key: _kind(measured.topologies[key[0]], key[1], key[2]) for key in reached}
    alike: dict[str, list[float]] = {}
    for key, gbps in reached.items():
        alike.setdefault(kinds[key], []).append(gbps)
    usual = {kind: statistics.median(speeds) for kind, speeds in alike.items()}
    slow = []
    for host, own in measured.links.items():
        below = {pair for pair in own if reached[(host, *pair)] < BELOW * usual[kinds[(host, *pair)]]}
        gpus, rest = slow_endpoints(below, own)
        slow += [
            _slow(
                host,
                f"every link of GPU {gpu} is slower than its like, at most "
                f"{max(reached[(host, *pair)] for pair in own if gpu in pair):.3g} GB/s at {_named(size)}",
                f"see its PCIe width and NVLinks (nvidia-smi -q -i {gpu}, nvidia-smi nvlink -s -i {gpu}), or "
                "leave it out with --gpus",
            )
            for gpu in gpus
        ] + [
            _slow(
                host,
                f"GPUs {a} and {b} exchange {_named(size)} at {reached[host, a, b]:.3g} GB/s, links of the same "
                f"kind ({kinds[host, a, b]}) {usual[kinds[host, a, b]]:.3g}",
                f"see nvidia-smi nvlink -s -i {a} and nvidia-smi topo -p2p r; --measured FILE chooses around it",
            )
            for a, b in rest
        ]
    return slow


def slow_endpoints(
    slow: Collection[tuple[Node, Node]], pairs: Iterable[tuple[Node, Node]]
) -> tuple[list[Node], list[tuple[Node, Node]]]:
    """Return the endpoints with several pairs, all slow, and the slow pairs without these endpoints."""
    own: dict[Node, list[bool]] = {}
    for pair in pairs:
        for node in pair:
            own.setdefault(node, []).append(pair in slow)
    nodes = [node for node, slows in own.items() if len(slows) > 1 and all(slows)]
    return nodes, sorted(pair for pair in slow if not set(pair) & set(nodes))


Key = TypeVar("Key", bound=Hashable)


def _at_one_size(measured: Mapping[Key, Speeds]) -> tuple[int, dict[Key, float]]:
    """Return the largest size that was measured for all, and the GB/s of each at that size."""
    common = (
        set.intersection(*({speed.bytes for speed in speeds} for speeds in measured.values())) if measured else set()
    )
    size = max(common, default=0)
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
    """Format latency and GB/s of hosts, pairs and all together; the GPU matrix and the gain of selecting GPUs by it."""
    rows = [["GB/s", "latency", *COLUMNS.values()]]
    rows += [_row(f"on {host}", speeds) for host, speeds in measured.hosts.items()]
    rows += [_row(f"{host} and {other}", speeds) for (host, other), speeds in measured.pairs.items()]
    rows += [_row("over all", measured.over_all)] if measured.over_all else []
    blocks = [aligned(rows)] if len(rows) > 1 else []
    for links in gpu_links(measured):
        cells = [["-" if speed is None else f"{speed:.1f}" for speed in row] for row in links.gb_per_s]
        names = [f"GPU{gpu}" for gpu in links.gpus]
        blocks.append(aligned([[links.host, *names], *([name, *row] for name, row in zip(names, cells, strict=True))]))
        topology = with_measured(measured.topologies[links.host], [links], links.host)
        blocks.append("\n".join(f"{links.host}: {gain}" for gain in gains(topology)))
    blocks += [] if measured.sums is None else [allreduce.table(measured.sums)]
    return "\n\n".join([*blocks, *measured.nccl])


def _row(what: str, speeds: Speeds) -> list[str]:
    at = {speed.bytes: speed for speed in speeds}
    latency = f"{speeds[0].median_s * 1e3:.3f} ms" if speeds else "-"
    return [what, latency, *(f"{at[size].gb_per_s:.3g}" if size in at else "-" for size in COLUMNS)]


def bandwidth_json(measured: Bandwidth) -> dict[str, Any]:
    """Return the measurements for programs; --measured reads `gpu_links`."""
    return {
        "hosts": {host: _plain(speeds) for host, speeds in measured.hosts.items()},
        "pairs": [{"hosts": list(pair), "speeds": _plain(speeds)} for pair, speeds in measured.pairs.items()],
        "over_all": _plain(measured.over_all),
        "gpu_links": [
            {"host": links.host, "gpus": links.gpus, "uuids": links.uuids, "gb_per_s": links.gb_per_s}
            for links in gpu_links(measured)
        ],
        **({} if measured.sums is None else {"sums": asdict(measured.sums)}),
    }


def _plain(speeds: Sequence[Speed]) -> list[dict[str, float]]:
    return [{"bytes": speed.bytes, "median_s": speed.median_s, "gb_per_s": speed.gb_per_s} for speed in speeds]
