"""Boxes, lines and text -> an SVG file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

from launch.errors import TopologyError, harmless
from launch.files import write_whole

_CURVE_POINTS = 64
_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"


@dataclass(frozen=True, kw_only=True)
class Box:
    """A rectangle with round corners."""

    x: float  # of its left edge
    y: float  # of its upper edge
    width: float
    height: float
    fill: str
    stroke: str
    radius: float = 6.0


@dataclass(frozen=True, kw_only=True)
class Polyline:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float


@dataclass(frozen=True, kw_only=True)
class Text:
    """A line of text, vertically centred."""

    x: float  # of its middle, or of its left edge
    y: float  # of its middle
    text: str
    size: float
    color: str = "#1f2933"
    bold: bool = False
    left: bool = False  # x is its left edge


Shape = Box | Polyline | Text


def text_width(text: str, size: float) -> float:
    """Return an upper bound of the text's width; most letters are narrower."""
    return 0.6 * size * len(text)


def fit(text: str, width: float, size: float) -> str:
    """Shorten the text to the width."""
    most = max(int(width / (0.6 * size)), 1)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def label(text: str, x: float, y: float, *, size: float, color: str) -> tuple[Shape, Shape]:
    """Return text on a white background, for a label on a line."""
    wide, high, white = text_width(text, size) + 6, size + 4, "#ffffff"
    ground = Box(x=x - wide / 2, y=y - high / 2, width=wide, height=high, fill=white, stroke=white, radius=4)
    return ground, Text(x=x, y=y, text=text, size=size, color=color, bold=True)


def arc(start: float, end: float, base: float, high: float) -> tuple[tuple[float, float], ...]:
    """Return a Bezier curve with vertical ends, with its top `high` above `base`."""
    steps = [i / _CURVE_POINTS for i in range(_CURVE_POINTS + 1)]
    return tuple((start + (end - start) * (3 * t * t - 2 * t**3), base - high * 4 * t * (1 - t)) for t in steps)


def save(shapes: Sequence[Shape], *, width: float, height: float, path: Path) -> None:
    """Write the picture as SVG; TopologyError if the name does not end in .svg, or if that fails."""
    if path.suffix != ".svg":
        raise TopologyError(f"{path}: a picture's name ends in .svg")
    try:
        write_whole(path, svg(shapes, width=width, height=height))
    except OSError as error:
        raise TopologyError(f"{path}: cannot be written: {error.strerror or error}") from None


def svg(shapes: Sequence[Shape], *, width: float, height: float) -> str:
    """Return the picture as the text of an SVG file."""
    root = ET.Element("svg", xmlns="http://www.w3.org/2000/svg", width=f"{width:g}", height=f"{height:g}")
    root.set("font-family", _FONT)
    ET.SubElement(root, "rect", width=f"{width:g}", height=f"{height:g}", fill="#ffffff")
    for shape in shapes:
        element = ET.SubElement(root, {Box: "rect", Polyline: "polyline", Text: "text"}[type(shape)])
        for name, value in _attributes(shape).items():
            element.set(name, f"{value:g}" if isinstance(value, float) else str(value))
        element.text = harmless(shape.text) if isinstance(shape, Text) else None
    ET.indent(root, "")
    return ET.tostring(root, encoding="unicode") + "\n"


def _attributes(shape: Shape) -> Mapping[str, object]:
    match shape:
        case Box():
            sizes = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height, "rx": shape.radius}
            return {**sizes, "fill": shape.fill, "stroke": shape.stroke}
        case Polyline():
            points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
            return {"points": points, "fill": "none", "stroke": shape.color, "stroke-width": shape.width}
        case Text():
            place = {"x": shape.x, "y": shape.y, "dy": "0.35em", "font-size": shape.size, "fill": shape.color}
            anchor, weight = "start" if shape.left else "middle", "bold" if shape.bold else "normal"
            return {**place, "text-anchor": anchor, "font-weight": weight}
