"""A picture of a topology: GPUs in a row by NUMA node, NVLinks as arcs above, PCIe switches, NICs and disks below."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path

from launch.cores import core_list
from launch.machine.show.canvas import Box, Line, Shape, Text, arc, fit, label, save, text_width
from launch.machine.show.table import MEANINGS, link_word, nearest
from launch.machine.topology import PCIE_KINDS, Disk, Link, Nic, Topology, through_switch

_MARGIN = 24.0
_COLUMN, _GPU, _GPU_HEIGHT = 104.0, 84.0, 46.0  # width of a GPU's column, and of its box
_PAD, _GAP = 12.0, 28.0  # around a NUMA node's columns, between NUMA nodes
_CHIP, _CHIP_STEP = 20.0, 26.0  # height of a NIC or a disk, and distance to the next
_ARC_LOW, _ARC_STEP = 34.0, 27.0  # height of an arc to the neighbour, and increment for each further column

_SWITCHED = ("PIX", "PXB")
_INK, _SOFT = "#1f2933", "#5b6b7b"
_NODE = ("#f3f6f9", "#c3ced9")  # fill and stroke
_SWITCH = ("#e3ecf5", "#9db4cb")
_FREE, _TAKEN = ("#ffffff", "#2f5d8a"), ("#d8d8d8", "#9a9a9a")
_CARD = ("#fff4dd", "#d9a441")
_LINKS = ("#0f7b6c", "#3f8fd2", "#d9782d", "#8e5bb5", "#7a7a7a")  # most NVLinks first


@dataclass(frozen=True, kw_only=True)
class _Card:
    """A NIC or a disk, the kind of its best link, and the GPUs, by position, with a link of that kind to it."""

    name: str
    kind: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Cluster:
    """GPUs, by position, behind the same PCIe switches, and the NICs behind them."""

    gpus: tuple[int, ...]
    nics: tuple[tuple[str, ...], ...]  # below each GPU
    kind: str  # PIX or PXB; empty for a single GPU


@dataclass(frozen=True, kw_only=True)
class _Node:
    """The part of the picture for one NUMA node."""

    title: str
    cores: str
    clusters: tuple[_Cluster, ...]
    nics: tuple[tuple[str, ...], ...]  # at its host bridges, below each of its GPUs

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(gpu for cluster in self.clusters for gpu in cluster.gpus)

    @property
    def width(self) -> float:
        return _COLUMN * len(self.gpus) + 2 * _PAD


def draw(topology: Topology, path: Path) -> None:
    """Write the picture to `path`, as SVG.

    Raises:
        TopologyError: the name does not end in .svg, or the file cannot be written.
    """
    shapes, width, height = shapes_of(topology)
    save(shapes, width=width, height=height, path=path)


def shapes_of(topology: Topology) -> tuple[list[Shape], float, float]:
    """Return the shapes of the picture, its width and its height."""
    nodes = _nodes(topology)
    far = tuple(device.name for device in topology.devices if not _nearest_gpus(topology, device)[0])
    top = _MARGIN + 34 + _height_above(topology, nodes)
    depth = max((_depth(node) for node in nodes), default=0.0)
    columns: dict[int, float] = {}  # the middle of each GPU's column, by position
    below: list[Shape] = []
    left = _MARGIN
    for node in nodes:
        columns |= {gpu: left + _PAD + _COLUMN * (i + 0.5) for i, gpu in enumerate(node.gpus)}
        below += _draw_node(topology, node, left=left, top=top, depth=depth)
        left += node.width + _GAP
    if far:
        below += _draw_far(far, left=left, top=top)
        left += _COLUMN + 2 * _PAD + _GAP
    bottom = top + max(depth, 34 + _CHIP_STEP * len(far) if far else 0.0)
    between, bottom = _between_nodes(topology, nodes, bottom=bottom)
    legend, right, bottom = _legend(topology, top=bottom + 22)
    names = sorted({gpu.name for gpu in topology.gpus if gpu.name})
    title = " · ".join([f"{len(topology.gpus)} GPU{'s' * (len(topology.gpus) != 1)}", *names, topology.source])
    width = max(left - _GAP, right, _MARGIN + text_width(title[:80], 18)) + _MARGIN
    head: list[Shape] = [Text(x=_MARGIN, y=_MARGIN + 10, text=title[:80], size=18, bold=True, left=True)]
    return [*head, *below, *_nvlinks(topology, columns, top=top), *between, *legend], width, bottom + _MARGIN


def _nodes(topology: Topology) -> list[_Node]:
    """Group the GPUs by NUMA node, else by the cores near them, else all together."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for place, gpu in enumerate(topology.gpus):
        groups.setdefault((gpu.numa, gpu.cores if not gpu.numa else ()), []).append(place)
    near = [(device.name, *_nearest_gpus(topology, device)) for device in topology.devices]
    nodes = []
    for (numa, _), gpus in groups.items():
        cards = [_Card(name=name, kind=kind, gpus=best) for name, kind, best in near if best and best[0] in gpus]
        cores = sorted({core for gpu in gpus for core in topology.gpus[gpu].cores})
        clusters = tuple(_clusters(topology, gpus, [card for card in cards if card.kind in _SWITCHED]))
        title = f"NUMA node{'s' * (len(numa) > 1)} {core_list(numa)}" if numa else "NUMA node unknown"
        nodes.append(
            _Node(
                title=" · ".join([title, *_kinds_inside(topology, clusters)]),
                cores=f"cores {core_list(cores) or 'unknown'}",
                clusters=clusters,
                nics=_nics_below(
                    [gpu for cluster in clusters for gpu in cluster.gpus],
                    [replace(card, name=f"{card.name} {card.kind}") for card in cards if card.kind not in _SWITCHED],
                ),
            )
        )
    return nodes


def _kinds_inside(topology: Topology, clusters: tuple[_Cluster, ...]) -> list[str]:
    """Describe the links between GPUs of one NUMA node without a common PCIe switch."""
    pairs = [(a, b) for cluster, other in combinations(clusters, 2) for a in cluster.gpus for b in other.gpus]
    kinds = {topology.links[a][b].kind for a, b in pairs}
    names = "/".join(kind for kind in PCIE_KINDS if kind in kinds)
    return [f"{names} inside"] if names else []


def _nics_below(gpus: Sequence[int], cards: list[_Card]) -> tuple[tuple[str, ...], ...]:
    """Return the NICs below each GPU: each NIC is placed below the one of its nearest GPUs with the fewest so far."""
    stacks: dict[int, list[str]] = {gpu: [] for gpu in gpus}
    for card in cards:
        place = min((gpu for gpu in card.gpus if gpu in stacks), key=lambda gpu: len(stacks[gpu]))
        stacks[place].append(card.name)
    return tuple(tuple(stack) for stack in stacks.values())


def _nearest_gpus(topology: Topology, device: Nic | Disk) -> tuple[str, tuple[int, ...]]:
    """Return the kind of the device's best link and the positions of the GPUs with it; empty if the best is SYS."""
    if not topology.gpus or (best := nearest(topology, device))[0] == "SYS":
        return "", ()
    return best[0], tuple(place for place, gpu in enumerate(topology.gpus) if gpu.index in best[1])


def _clusters(topology: Topology, gpus: list[int], cards: list[_Card]) -> Iterator[_Cluster]:
    """Yield the GPUs of a NUMA node, grouped by common switches."""
    joined = [{a, b} for a, b in combinations(gpus, 2) if topology.links[a][b].kind in _SWITCHED]
    joined += [set(card.gpus) & set(gpus) for card in cards]
    sets: list[set[int]] = []
    for group in [*joined, *({gpu} for gpu in gpus)]:
        apart = [other for other in sets if not other & group]
        sets = [*apart, group.union(*(other for other in sets if other & group))]
    for members in sorted(sets, key=min):
        own = [card for card in cards if card.gpus[0] in members]
        kinds = {topology.links[a][b].kind for a, b in combinations(members, 2)} | {card.kind for card in own}
        yield _Cluster(
            gpus=tuple(sorted(members)),
            nics=_nics_below(sorted(members), own),
            kind="PXB" if "PXB" in kinds else "PIX" if "PIX" in kinds else "",
        )


def _stack_height(stacks: Iterable[tuple[str, ...]]) -> float:
    return _CHIP_STEP * max(map(len, stacks), default=0)


def _depth(node: _Node) -> float:
    """Return the height of a NUMA node's box."""
    chips = max(_stack_height(cluster.nics) for cluster in node.clusters) + _stack_height(node.nics)
    switches = any(cluster.kind for cluster in node.clusters)
    return 2 * _PAD + _GPU_HEIGHT + chips + (30 if switches else 6) + 40


def _draw_node(topology: Topology, node: _Node, *, left: float, top: float, depth: float) -> Iterator[Shape]:
    yield Box(x=left, y=top, width=node.width, height=depth, fill=_NODE[0], stroke=_NODE[1], radius=10)
    x, floor = left + _PAD, top + _PAD + _GPU_HEIGHT + max(_stack_height(cluster.nics) for cluster in node.clusters)
    for cluster in node.clusters:
        width = _COLUMN * len(cluster.gpus)
        if cluster.kind:
            high = floor - top - _PAD + 34
            yield Box(x=x + 3, y=top + 5, width=width - 6, height=high, fill=_SWITCH[0], stroke=_SWITCH[1])
            yield Text(x=x + width / 2, y=floor + 16, text=cluster.kind, size=11, color=_SOFT, bold=True)
        for i, gpu in enumerate(cluster.gpus):
            yield from _draw_gpu(topology, gpu, middle=x + _COLUMN * (i + 0.5), top=top + _PAD)
        yield from _chips(cluster.nics, left=x, top=top + _PAD + _GPU_HEIGHT + 8)
        x += width
    switches = any(cluster.kind for cluster in node.clusters)
    yield from _chips(node.nics, left=left + _PAD, top=floor + (34 if switches else 10))
    middle = left + node.width / 2
    for text, y, bold in ((node.title, depth - 32, True), (node.cores, depth - 15, False)):
        color = _INK if bold else _SOFT
        yield Text(x=middle, y=top + y, text=fit(text, node.width - 8, 11), size=11, color=color, bold=bold)


def _draw_gpu(topology: Topology, place: int, *, middle: float, top: float) -> Iterator[Shape]:
    gpu = topology.gpus[place]
    fill, stroke = _TAKEN if gpu.unusable else _FREE
    yield Box(x=middle - _GPU / 2, y=top, width=_GPU, height=_GPU_HEIGHT, fill=fill, stroke=stroke)
    small = (gpu.unusable or "").partition(":")[0] or (gpu.pci or "").removeprefix("0000:")
    high = top + _GPU_HEIGHT / 2 - (8 if small else 0)
    yield Text(x=middle, y=high, text=f"GPU {gpu.index}", size=15, bold=True)
    if small:
        yield Text(x=middle, y=high + 19, text=fit(small, _GPU - 8, 10), size=10, color=_SOFT)


def _chips(stacks: Iterable[tuple[str, ...]], *, left: float, top: float) -> Iterator[Shape]:
    for column, stack in enumerate(stacks):
        for i, name in enumerate(stack):
            x, y = left + _COLUMN * column + (_COLUMN - _GPU) / 2, top + _CHIP_STEP * i
            yield Box(x=x, y=y, width=_GPU, height=_CHIP, fill=_CARD[0], stroke=_CARD[1], radius=4)
            yield Text(x=x + _GPU / 2, y=y + _CHIP / 2, text=fit(name, _GPU - 4, 10), size=10)


def _draw_far(names: tuple[str, ...], *, left: float, top: float) -> Iterator[Shape]:
    width = _COLUMN + 2 * _PAD
    high = 34 + _CHIP_STEP * len(names)
    yield Box(x=left, y=top, width=width, height=high, fill="#ffffff", stroke=_NODE[1], radius=10)
    yield Text(x=left + width / 2, y=top + 16, text="near no GPU", size=11, color=_SOFT, bold=True)
    yield from _chips((names,), left=left + _PAD, top=top + 30)


def _height_above(topology: Topology, nodes: list[_Node]) -> float:
    """Return the height of the part above the GPUs."""
    if through_switch(topology):
        return 74.0
    columns = {gpu: i for i, gpu in enumerate(gpu for node in nodes for gpu in node.gpus)}
    spans = [abs(columns[a] - columns[b]) for a, b, _ in _bonds(topology)]
    return _ARC_LOW + _ARC_STEP * (max(spans) - 1) + 18 if spans else 8.0


def _bonds(topology: Topology) -> list[tuple[int, int, Link]]:
    """Return the pairs with NVLinks."""
    pairs = combinations(range(len(topology.gpus)), 2)
    return [(a, b, topology.links[a][b]) for a, b in pairs if topology.links[a][b].kind == "NV"]


def _colors(topology: Topology) -> dict[str, str]:
    """Return a colour for each number of NVLinks."""
    counts = {link_word(link): link.count for _, _, link in _bonds(topology)}
    ranked = sorted(counts, key=lambda name: -counts[name])
    return {name: _LINKS[min(i, len(_LINKS) - 1)] for i, name in enumerate(ranked)}


def _thickness(link: Link) -> float:
    return min(1.0 + 1.5 * link.count, 7.0)


def _nvlinks(topology: Topology, columns: dict[int, float], *, top: float) -> Iterator[Shape]:
    bonds, colors = _bonds(topology), _colors(topology)
    roof = top + _PAD  # of the GPUs
    if through_switch(topology):
        link = bonds[0][2]
        left, right = min(columns.values()) - _GPU / 2, max(columns.values()) + _GPU / 2
        for x in columns.values():
            yield Line(points=((x, roof), (x, top - 34)), color=colors[link_word(link)], width=_thickness(link))
        fill = colors[link_word(link)]
        yield Box(x=left, y=top - 62, width=right - left, height=30, fill=fill, stroke=fill)
        text = f"NVSwitch: {link_word(link)} between any two"
        yield Text(x=(left + right) / 2, y=top - 47, text=text, size=14, color="#ffffff", bold=True)
        return
    order = {gpu: i for i, gpu in enumerate(sorted(columns, key=lambda gpu: columns[gpu]))}
    ports = _ports(bonds, columns)
    labels: list[Shape] = []
    labelled = len(bonds) <= 12 or len(colors) > 1
    for a, b, link in sorted(bonds, key=lambda bond: -abs(order[bond[0]] - order[bond[1]])):
        high = _ARC_LOW + _ARC_STEP * (abs(order[a] - order[b]) - 1)
        start, end = ports[a, b], ports[b, a]
        yield Line(points=arc(start, end, roof, high + _PAD), color=colors[link_word(link)], width=_thickness(link))
        if labelled:
            labels += label(link_word(link), (start + end) / 2, top - high, size=10, color=colors[link_word(link)])
    yield from labels


def _ports(bonds: list[tuple[int, int, Link]], columns: dict[int, float]) -> dict[tuple[int, int], float]:
    """Return the position of each arc's end at each GPU, by (GPU, other GPU), so that nested arcs do not cross."""
    ports = {}
    for gpu, x in columns.items():
        others = [b if a == gpu else a for a, b, _ in bonds if gpu in {a, b}]
        to_left = sorted((other for other in others if columns[other] < x), key=lambda other: -columns[other])
        to_right = sorted((other for other in others if columns[other] > x), key=lambda other: -columns[other])
        step = (_GPU - 16) / max(len(others), 1)
        for i, other in enumerate([*to_left, *to_right]):
            ports[gpu, other] = x + step * (i - (len(others) - 1) / 2)
    return ports


def _between_nodes(topology: Topology, nodes: list[_Node], *, bottom: float) -> tuple[list[Shape], float]:
    """Draw a line under the NUMA nodes that shows the links between GPUs of different nodes without NVLinks."""
    home = {gpu: i for i, node in enumerate(nodes) for gpu in node.gpus}
    across = [
        topology.links[a][b].kind
        for a, b in combinations(home, 2)
        if home[a] != home[b] and topology.links[a][b].kind in PCIE_KINDS
    ]
    if not across:
        return [], bottom
    lefts = [_MARGIN + sum(node.width + _GAP for node in nodes[:i]) for i in range(len(nodes))]
    middles = [left + node.width / 2 for left, node in zip(lefts, nodes, strict=True)]
    low = bottom + 20
    shapes: list[Shape] = [Line(points=((x, bottom), (x, low)), color=_SOFT, width=2) for x in middles]
    shapes.append(Line(points=((middles[0] - 1, low), (middles[-1] + 1, low)), color=_SOFT, width=2))
    text = "/".join(kind for kind in PCIE_KINDS if kind in across)
    shapes += label(text, (middles[0] + middles[-1]) / 2, low, size=11, color=_SOFT)
    return shapes, low + 9


def _legend(topology: Topology, *, top: float) -> tuple[list[Shape], float, float]:
    """Return the legend with speeds, its right edge and its lower edge."""
    places = range(len(topology.gpus))
    pairs = [topology.links[a][b] for a, b in combinations(places, 2)]
    pcie = {link.kind for link in pairs} | {link.kind for device in topology.devices for link in device.links}
    colors = _colors(topology)
    entries: list[tuple[str, str, Link | None]] = []
    for name in colors:
        link = next(link for link in pairs if link_word(link) == name)
        meaning = f"{link.count} NVLink{'s' * (link.count > 1)}"
        entries.append((name, meaning, link))
    entries += [(kind, MEANINGS[kind], None) for kind in PCIE_KINDS if kind in pcie]
    shapes: list[Shape] = []
    right = 0.0
    for i, (name, meaning, bond) in enumerate(entries):
        y = top + 18 * i
        speeds = sorted({link.gbps for link in pairs if link_word(link) == name and link.gbps is not None})
        text = f"{meaning}, {' or '.join(f'{speed:g}' for speed in speeds)} GB/s one way" if speeds else meaning
        if bond:
            ends = ((_MARGIN, y), (_MARGIN + 26, y))
            shapes.append(Line(points=ends, color=colors[name], width=_thickness(bond)))
        shapes.append(Text(x=_MARGIN + 36, y=y, text=name, size=11, bold=True, left=True))
        shapes.append(Text(x=_MARGIN + 84, y=y, text=text, size=11, color=_SOFT, left=True))
        right = max(right, _MARGIN + 84 + text_width(text, 11))
    taken = [gpu for gpu in topology.gpus if gpu.unusable]
    for i, gpu in enumerate(taken, start=len(entries)):
        text = f"GPU {gpu.index} cannot be used: {gpu.unusable}"[:100]
        shapes.append(Text(x=_MARGIN + 36, y=top + 18 * i, text=text, size=11, color=_SOFT, left=True))
        right = max(right, _MARGIN + 36 + text_width(text, 11))
    return shapes, right, top + 18 * (len(entries) + len(taken))
