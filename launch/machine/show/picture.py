"""A picture of a topology: GPUs in a row by NUMA node, NVLinks as arcs above, PCIe switches, NICs and disks below."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from launch.cores import core_list
from launch.machine.show.canvas import Box, Polyline, Shape, Text, arc, fit, label, save, text_width
from launch.machine.show.table import MEANINGS, link_word, nearest
from launch.machine.topology import PCIE_KINDS, Link, Topology, through_switch

_MARGIN = 24.0
_COLUMN, _GPU, _GPU_HEIGHT = 104.0, 84.0, 46.0  # width of a GPU's column, and of its box
_PAD, _GAP = 12.0, 28.0  # around a NUMA node's columns, between NUMA nodes
_CHIP, _CHIP_STEP = 20.0, 26.0  # height of a NIC or a disk, and distance to the next
_CHIPS = _PAD + _GPU_HEIGHT + 34  # below the upper edge of a NUMA node
_ARC_LOW, _ARC_STEP = 34.0, 27.0  # height of an arc to the neighbour, and increment for each further column

_SWITCHED = ("PIX", "PXB")
_INK, _SOFT = "#1f2933", "#5b6b7b"
_NODE = ("#f3f6f9", "#c3ced9")  # fill and stroke
_SWITCH = ("#e3ecf5", "#9db4cb")
_FREE, _TAKEN = ("#ffffff", "#2f5d8a"), ("#d8d8d8", "#9a9a9a")
_CARD = ("#fff4dd", "#d9a441")
_LINKS = ("#0f7b6c", "#3f8fd2", "#d9782d", "#8e5bb5", "#7a7a7a")  # most NVLinks first


@dataclass(frozen=True, kw_only=True)
class _Node:
    """The part of the picture for one NUMA node, or for devices near no GPU."""

    title: str
    cores: str
    switches: tuple[tuple[int, ...], ...]  # GPUs, by position, behind the same PCIe switches
    cards: tuple[tuple[str, ...], ...]  # NICs and disks below each column

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(gpu for members in self.switches for gpu in members)

    @property
    def width(self) -> float:
        return _COLUMN * len(self.cards) + 2 * _PAD


def draw(topology: Topology, path: Path) -> None:
    """Write the picture to `path`, as SVG; TopologyError if the name does not end in .svg, or if that fails."""
    shapes, width, height = shapes_of(topology)
    save(shapes, width=width, height=height, path=path)


def shapes_of(topology: Topology) -> tuple[list[Shape], float, float]:
    """Return the shapes of the picture, its width and its height."""
    nodes = _nodes(topology)
    order = {gpu: place for place, gpu in enumerate(gpu for node in nodes for gpu in node.gpus)}
    top = _MARGIN + 34 + _height_above(topology, order)
    stacked = max((len(stack) for node in nodes for stack in node.cards), default=0)
    depth = _CHIPS + _CHIP_STEP * stacked + 40 if nodes else 0.0
    columns: dict[int, float] = {}  # the middle of each GPU's column, by position
    shapes: list[Shape] = []
    left = _MARGIN
    for node in nodes:
        columns |= {gpu: left + _PAD + _COLUMN * (i + 0.5) for i, gpu in enumerate(node.gpus)}
        shapes += _draw_node(topology, node, left=left, top=top, depth=depth)
        left += node.width + _GAP
    shapes += _nvlinks(topology, columns, order, top=top)
    legend, right, bottom = _legend(topology, nodes, top=top + depth + 22)
    names = sorted({gpu.name for gpu in topology.gpus if gpu.name})
    title = " · ".join([f"{len(topology.gpus)} GPU{'s' * (len(topology.gpus) != 1)}", *names, topology.source])[:80]
    head = Text(x=_MARGIN, y=_MARGIN + 10, text=title, size=18, bold=True, left=True)
    width = max(left - _GAP, right, _MARGIN + text_width(title, 18)) + _MARGIN
    return [head, *shapes, *legend], width, bottom + _MARGIN


def _nodes(topology: Topology) -> list[_Node]:
    """Group the GPUs by NUMA node, else by the cores near them, else all together; then devices near none of them."""
    groups: dict[tuple[tuple[int, ...], tuple[int, ...]], list[int]] = {}
    for place, gpu in enumerate(topology.gpus):
        groups.setdefault((gpu.numa, gpu.cores if not gpu.numa else ()), []).append(place)
    stacks: dict[int, list[str]] = {place: [] for place in range(len(topology.gpus))}
    far = []
    for device in topology.devices:
        kind, near = nearest(topology, device) if topology.gpus else ("SYS", ())
        if kind == "SYS":
            far.append(device.name)
        else:  # below the one of its nearest GPUs with the fewest so far
            at = [place for place, gpu in enumerate(topology.gpus) if gpu.index in near]
            min((stacks[place] for place in at), key=len).append(f"{device.name} {kind}")
    nodes = []
    for (numa, _), gpus in groups.items():
        switches = _switches(topology, gpus)
        kinds = {topology.links[a][b].kind for one, other in combinations(switches, 2) for a in one for b in other}
        inside = "/".join(kind for kind in PCIE_KINDS if kind in kinds)
        title = f"NUMA node{'s' * (len(numa) > 1)} {core_list(numa)}" if numa else "NUMA node unknown"
        cores = core_list({core for gpu in gpus for core in topology.gpus[gpu].cores})
        nodes.append(
            _Node(
                title=f"{title} · {inside} inside" if inside else title,
                cores=f"cores {cores or 'unknown'}",
                switches=switches,
                cards=tuple(tuple(stacks[gpu]) for members in switches for gpu in members),
            )
        )
    return nodes + ([_Node(title="near no GPU", cores="", switches=(), cards=(tuple(far),))] if far else [])


def _switches(topology: Topology, gpus: list[int]) -> tuple[tuple[int, ...], ...]:
    """Return the GPUs of a NUMA node, grouped by common PCIe switches."""
    sets: list[set[int]] = []
    for gpu in gpus:
        joined = [members for members in sets if any(topology.links[gpu][b].kind in _SWITCHED for b in members)]
        sets = [members for members in sets if members not in joined] + [{gpu}.union(*joined)]
    return tuple(tuple(sorted(members)) for members in sorted(sets, key=min))


def _draw_node(topology: Topology, node: _Node, *, left: float, top: float, depth: float) -> Iterator[Shape]:
    yield Box(x=left, y=top, width=node.width, height=depth, fill=_NODE[0], stroke=_NODE[1], radius=10)
    x = left + _PAD
    for members in node.switches:
        width = _COLUMN * len(members)
        if len(members) > 1:
            kinds = {topology.links[a][b].kind for a, b in combinations(members, 2)}
            high = _PAD + _GPU_HEIGHT + 20
            yield Box(x=x + 3, y=top + 5, width=width - 6, height=high, fill=_SWITCH[0], stroke=_SWITCH[1])
            kind = "PXB" if "PXB" in kinds else "PIX"
            yield Text(x=x + width / 2, y=top + high - 8, text=kind, size=11, color=_SOFT, bold=True)
        for i, gpu in enumerate(members):
            yield from _draw_gpu(topology, gpu, middle=x + _COLUMN * (i + 0.5), top=top + _PAD)
        x += width
    for column, stack in enumerate(node.cards):
        for i, name in enumerate(stack):
            x, y = left + _PAD + _COLUMN * column + (_COLUMN - _GPU) / 2, top + _CHIPS + _CHIP_STEP * i
            yield Box(x=x, y=y, width=_GPU, height=_CHIP, fill=_CARD[0], stroke=_CARD[1], radius=4)
            yield Text(x=x + _GPU / 2, y=y + _CHIP / 2, text=fit(name, _GPU - 4, 10), size=10)
    middle, width = left + node.width / 2, node.width - 8
    yield Text(x=middle, y=top + depth - 32, text=fit(node.title, width, 11), size=11, color=_INK, bold=True)
    yield Text(x=middle, y=top + depth - 15, text=fit(node.cores, width, 11), size=11, color=_SOFT)


def _draw_gpu(topology: Topology, place: int, *, middle: float, top: float) -> Iterator[Shape]:
    gpu = topology.gpus[place]
    fill, stroke = _TAKEN if gpu.unusable else _FREE
    yield Box(x=middle - _GPU / 2, y=top, width=_GPU, height=_GPU_HEIGHT, fill=fill, stroke=stroke)
    small = (gpu.unusable or "").partition(":")[0] or (gpu.pci or "").removeprefix("0000:")
    high = top + _GPU_HEIGHT / 2 - (8 if small else 0)
    yield Text(x=middle, y=high, text=f"GPU {gpu.index}", size=15, bold=True)
    if small:
        yield Text(x=middle, y=high + 19, text=fit(small, _GPU - 8, 10), size=10, color=_SOFT)


def _height_above(topology: Topology, order: dict[int, int]) -> float:
    """Return the height of the part above the GPUs."""
    if through_switch(topology):
        return 74.0
    spans = [abs(order[a] - order[b]) for a, b, _ in _bonds(topology)]
    return _ARC_LOW + _ARC_STEP * (max(spans) - 1) + 18 if spans else 8.0


def _bonds(topology: Topology) -> list[tuple[int, int, Link]]:
    """Return the pairs with NVLinks."""
    return [(a, b, link) for (a, b), link in topology.pairs.items() if link.kind == "NV"]


def _colors(topology: Topology) -> dict[str, str]:
    """Return a colour for each number of NVLinks."""
    counts = {link_word(link): link.count for _, _, link in _bonds(topology)}
    ranked = sorted(counts, key=lambda name: -counts[name])
    return {name: _LINKS[min(i, len(_LINKS) - 1)] for i, name in enumerate(ranked)}


def _thickness(link: Link) -> float:
    return min(1.0 + 1.5 * link.count, 7.0)


def _nvlinks(topology: Topology, columns: dict[int, float], order: dict[int, int], *, top: float) -> Iterator[Shape]:
    bonds, colors = _bonds(topology), _colors(topology)
    roof = top + _PAD  # of the GPUs
    if through_switch(topology):
        word, wide = link_word(bonds[0][2]), _thickness(bonds[0][2])
        left, right = min(columns.values()) - _GPU / 2, max(columns.values()) + _GPU / 2
        for x in columns.values():
            yield Polyline(points=((x, roof), (x, top - 34)), color=colors[word], width=wide)
        yield Box(x=left, y=top - 62, width=right - left, height=30, fill=colors[word], stroke=colors[word])
        text = f"NVSwitch: {word} between any two"
        yield Text(x=(left + right) / 2, y=top - 47, text=text, size=14, color="#ffffff", bold=True)
        return
    labels: list[Shape] = []
    for a, b, link in sorted(bonds, key=lambda bond: -abs(order[bond[0]] - order[bond[1]])):
        high, color = _ARC_LOW + _ARC_STEP * (abs(order[a] - order[b]) - 1), colors[link_word(link)]
        yield Polyline(points=arc(columns[a], columns[b], roof, high + _PAD), color=color, width=_thickness(link))
        if len(bonds) <= 12 or len(colors) > 1:
            labels += label(link_word(link), (columns[a] + columns[b]) / 2, top - high, size=10, color=color)
    yield from labels


def _legend(topology: Topology, nodes: Sequence[_Node], *, top: float) -> tuple[list[Shape], float, float]:
    """Return the legend with speeds, its right edge and its lower edge."""
    pairs, colors = topology.pairs, _colors(topology)
    bonds = {link_word(link): link for _, _, link in _bonds(topology)}
    kinds = {link.kind for links in (pairs.values(), *(device.links for device in topology.devices)) for link in links}
    home = {gpu: node.title for node in nodes for gpu in node.gpus}
    across = {link.kind for (a, b), link in pairs.items() if home[a] != home[b]}
    lines = {name: f"{bonds[name].count} NVLink{'s' * (bonds[name].count > 1)}" for name in colors}
    lines |= {kind: MEANINGS[kind] for kind in PCIE_KINDS if kind in kinds}
    for name in lines:
        speeds = sorted({link.gbps for link in pairs.values() if link_word(link) == name and link.gbps is not None})
        lines[name] += f", {' or '.join(f'{speed:g}' for speed in speeds)} GB/s one way" if speeds else ""
        lines[name] += ", between the NUMA nodes" if name in across else ""
    lines |= {f"GPU {gpu.index}": f"cannot be used: {gpu.unusable}"[:94] for gpu in topology.gpus if gpu.unusable}
    shapes: list[Shape] = []
    for i, (name, meaning) in enumerate(lines.items()):
        y = top + 18 * i
        if name in bonds:
            ends = ((_MARGIN, y), (_MARGIN + 26, y))
            shapes.append(Polyline(points=ends, color=colors[name], width=_thickness(bonds[name])))
        shapes.append(Text(x=_MARGIN + 36, y=y, text=name, size=11, bold=True, left=True))
        shapes.append(Text(x=_MARGIN + 84, y=y, text=meaning, size=11, color=_SOFT, left=True))
    right = max((text_width(meaning, 11) for meaning in lines.values()), default=0.0)
    return shapes, _MARGIN + 84 + right, top + 18 * len(lines)
