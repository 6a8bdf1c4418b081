"""The GPUs that hvdlaunch selects out of eight V100, compared with the worst four."""

from collections.abc import Sequence
from math import cos, pi, sin
from pathlib import Path

from launch.machine.saved import read_topology
from launch.machine.topology import Topology
from launch.placement.selection import ring_order, select
from scripts.docs.pictures.canvas import Canvas, Kind, Point

SAVED = Path(__file__).resolve().parents[3] / "docs" / "eight_v100.txt"
RADIUS = 122


def draw() -> str:
    """Draw both sets, with the NVLinks of the machine; thick lines are the ring."""
    topology = read_topology(SAVED.read_text(), name=SAVED.name, gpu_name="V100")
    selection = select(topology, 4)
    canvas = Canvas(760, 420, "Of eight V100 hvdlaunch chooses four with two NVLink rings")
    best, worst = selection.best, (selection.worst or selection.best).gpus
    speed = f"two NVLink rings, {best.bandwidth_gbps:g} GB/s"
    _panel(canvas, 200, topology, best.ring, kind="green")
    _words(canvas, 200, f"chosen: {', '.join(map(str, best.gpus))}", speed)
    _panel(canvas, 560, topology, ring_order(topology, worst), kind="red")
    _words(canvas, 560, f"worst: {', '.join(map(str, worst))}", "no NVLink ring: dashed pairs have no NVLink")
    canvas.text(
        380, 400, "thin lines: NVLinks of the machine, two side by side where a pair has two", ink="soft", size=12.5
    )
    return canvas.svg()


def _words(canvas: Canvas, x: float, title: str, below: str) -> None:
    canvas.text(x, 30, title, bold=True, size=16)
    canvas.text(x, 372, below, size=13)


def _panel(canvas: Canvas, x: float, topology: Topology, ring: Sequence[int], *, kind: Kind) -> None:
    places = {gpu: _place(x, gpu) for gpu in range(len(topology.gpus))}
    for one, start in places.items():
        for other, end in places.items():
            if one < other:
                for shift in _shifts(topology.links[one][other].count):
                    canvas.line(*_beside(start, end, shift), width=1)
    for one, other in zip(ring, [*ring[1:], ring[0]], strict=True):
        has_link = topology.links[one][other].count > 0
        canvas.line(places[one], places[other], ink=kind, width=5, dashed=not has_link)
    for gpu, place in places.items():
        canvas.circle(*place, 19, str(gpu), kind=kind if gpu in ring else "plain")


def _place(x: float, gpu: int) -> Point:
    """Return the position of a GPU; those of a NUMA node are on one half of the circle."""
    angle = 2 * pi * (gpu + 0.5) / 8 + pi / 2
    return x + RADIUS * cos(angle), 202 + RADIUS * sin(angle)


def _shifts(links: int) -> Sequence[float]:
    return {0: (), 1: (0.0,)}.get(links, (-3.0, 3.0))


def _beside(start: Point, end: Point, shift: float) -> tuple[Point, Point]:
    """Return the line, shifted sideways."""
    (x0, y0), (x1, y1) = start, end
    length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
    dx, dy = shift * (y1 - y0) / length, -shift * (x1 - x0) / length
    return (x0 + dx, y0 + dy), (x1 + dx, y1 + dy)
