from itertools import combinations
from xml.etree import ElementTree as ET

import pytest

from launch.machine.show.canvas import Box, Polyline, Text, fit, svg, text_width
from launch.machine.show.picture import shapes_of
from launch.machine.topology import Gpu, Link, Nic, Topology

SELF = Link(kind="X")


def machine(link, gpus, *, nics=(), numa=None, **facts):
    """`link` is that of all pairs, or gives that of two GPUs; a NIC is a name and the kinds of its links."""

    def between(a, b):
        return SELF if a == b else link if isinstance(link, Link) else link(min(a, b), max(a, b))

    numa = numa or [(2 * i // gpus,) for i in range(gpus)]
    links = tuple(tuple(between(a, b) for b in range(gpus)) for a in range(gpus))
    return Topology(
        source="a machine with <tags> & more",
        gpus=tuple(Gpu(index=i, cores=(2 * i, 2 * i + 1), numa=numa[i], **facts) for i in range(gpus)),
        links=links,
        nics=tuple(Nic(name=name, links=tuple(Link(kind=kind) for kind in kinds)) for name, kinds in nics),
    )


def nv(count, gbps=None):
    return Link(kind="NV", count=count, gbps=gbps)


FAR = ["SYS"] * 4
CUBE = {"03": 2, "04": 2, "12": 2, "15": 2, "23": 2, "47": 2, "56": 2, "67": 2}
CUBE |= {"01": 1, "02": 1, "13": 1, "26": 1, "37": 1, "45": 1, "46": 1, "57": 1}
SYS, NODE, PIX = (Link(kind=kind) for kind in ("SYS", "NODE", "PIX"))


def pcie(a, b):
    return PIX if a // 2 == b // 2 else NODE if a // 4 == b // 4 else Link(kind="SYS", gbps=10.0)


CUBE_MESH = machine(
    lambda a, b: nv(CUBE[f"{a}{b}"], 20.0 * CUBE[f"{a}{b}"]) if f"{a}{b}" in CUBE else SYS,
    8,
    nics=[("mlx5_0", ["PIX", "PIX", "PHB", "PHB", *FAR]), ("mlx5_bond_0_of_many_letters", [*FAR, *["NODE"] * 4])],
)
MACHINES = {
    "none": Topology(source="none"),
    "cube mesh": CUBE_MESH,
    "switch": machine(nv(18, 370.8), 8, nics=[(f"mlx5_{i}", [*FAR[:i], "PXB", *FAR, *FAR][:8]) for i in range(5)]),
    "pcie": machine(pcie, 8, name="NVIDIA GeForce RTX 4090", pci="0000:3b:00.0", unusable="busy: pid 12345, 23456"),
    "all pairs unlike": machine(lambda a, b: nv(a + b), 6, numa=[()] * 6),
    "node each": machine(nv(6), 4, numa=[(i, *range(8 * i + 5, 8 * i + 12)) for i in range(4)]),
    "far NICs": machine(pcie, 4, nics=[(f"mlx5_{i}", FAR) for i in range(12)]),
}


def edges(shape):
    """Left, top, right and bottom."""
    if isinstance(shape, Text):
        wide = text_width(shape.text, shape.size)
        left = shape.x if shape.left else shape.x - wide / 2
        return left, shape.y - shape.size / 2, left + wide, shape.y + shape.size / 2
    return shape.x, shape.y, shape.x + shape.width, shape.y + shape.height


def overlap(a, b):
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]


def inside(a, b):
    return a[0] >= b[0] and a[1] >= b[1] and a[2] <= b[2] and a[3] <= b[3]


@pytest.mark.parametrize("name", MACHINES)
def test_words_lie_on_no_others_and_boxes_inside_each_other_or_apart(name):
    shapes, width, height = shapes_of(MACHINES[name])
    words = [shape for shape in shapes if isinstance(shape, Text)]
    for text in words:
        assert inside(edges(text), (0, 0, width, height)), text
    for text, other in combinations(words, 2):
        assert not overlap(edges(text), edges(other)), (text.text, other.text)
    boxes = [edges(shape) for shape in shapes if isinstance(shape, Box) and shape.fill != "#ffffff"]
    for a, b in combinations(boxes, 2):
        assert not overlap(a, b) or inside(a, b) or inside(b, a), (a, b)


def texts(topology):
    return [shape.text for shape in shapes_of(topology)[0] if isinstance(shape, Text)]


def test_every_nvlink_is_a_line_with_its_count_thick_by_it_and_a_switch_one_bar_with_a_line_to_each_gpu():
    shapes = shapes_of(CUBE_MESH)[0]
    arcs = [shape for shape in shapes if isinstance(shape, Polyline) and len(shape.points) > 10]
    assert len(arcs) == len(CUBE)
    assert sorted({arc.width for arc in arcs}) == [2.5, 4.0]
    labels = [shape.text for shape in shapes if isinstance(shape, Text) and shape.bold and shape.size == 10]
    assert (labels.count("NV1"), labels.count("NV2")) == (8, 8)
    shapes = shapes_of(MACHINES["switch"])[0]
    assert "NVSwitch: NV18 between any two" in texts(MACHINES["switch"])
    upright = [line for line in shapes if isinstance(line, Polyline) and line.points[0][0] == line.points[1][0]]
    assert len(upright) == 8
    assert not [shape for shape in shapes if isinstance(shape, Polyline) and len(shape.points) > 10]


def test_switches_of_pcie_numa_nodes_and_speeds_are_shown():
    shown = texts(MACHINES["pcie"])
    assert shown.count("PIX") == 4 + 1  # on each switch, and in the legend
    assert "NUMA node 0 · NODE inside" in shown
    assert "cores 0-7" in shown
    between = "PCIe, and on through the link between NUMA nodes or CPU sockets, 10 GB/s one way, between the NUMA nodes"
    assert between in shown
    assert shown.count("busy") == 8
    assert shown.count("cannot be used: busy: pid 12345, 23456") == 8
    assert {"2 NVLinks, 40 GB/s one way", "1 NVLink, 20 GB/s one way"} < set(texts(CUBE_MESH))


def test_the_svg_is_well_formed_whatever_the_names():
    shapes, width, height = shapes_of(CUBE_MESH)
    root = ET.fromstring(svg(shapes, width=width, height=height))  # noqa: S314 (written here)
    shown = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert shown[0] == "8 GPUs · a machine with <tags> & more"
    assert "mlx5_bond_0_o" not in shown  # cut to its box
    ET.fromstring(svg([Text(x=0, y=0, text="a\x00\x1b\nb", size=9)], width=1, height=1))  # noqa: S314


def test_cuts_words_to_their_box():
    assert fit("mlx5_0", 84, 10) == "mlx5_0"
    cut = fit("mlx5_bond_0_of_many_letters", 84, 10)
    assert cut.endswith("…")
    assert text_width(cut, 10) <= 84
    assert fit("abc", 1, 10) == "…"
