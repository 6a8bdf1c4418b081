"""Boxes, lines and words -> an SVG or a PNG file."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launch.errors import TopologyError

_PNG_SCALE = 2  # pixels of the PNG for each unit of the picture
_SMOOTH = 2  # Pillow draws without anti-aliasing: draw larger, then shrink
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
class Line:
    """A line through points."""

    points: tuple[tuple[float, float], ...]
    color: str
    width: float


@dataclass(frozen=True, kw_only=True)
class Text:
    """One line of text, centred at a height."""

    x: float  # of its middle, or of its left edge
    y: float  # of its middle
    text: str
    size: float
    color: str = "#1f2933"
    bold: bool = False
    left: bool = False  # x is its left edge


Shape = Box | Line | Text


def text_width(text: str, size: float) -> float:
    """How wide the text is at most, in SVG and PNG alike; most letters are narrower."""
    return 0.6 * size * len(text)


def fit(text: str, width: float, size: float) -> str:
    """The text, cut to the width."""
    most = max(int(width / (0.6 * size)), 1)
    return text if len(text) <= most else f"{text[: most - 1]}…"


def label(text: str, x: float, y: float, *, size: float, color: str) -> tuple[Shape, Shape]:
    """Text on a white ground, to stand on a line."""
    wide, high = text_width(text, size) + 6, size + 4
    ground = Box(x=x - wide / 2, y=y - high / 2, width=wide, height=high, fill="#ffffff", stroke="#ffffff", radius=4)
    return ground, Text(x=x, y=y, text=text, size=size, color=color, bold=True)


def arc(start: float, end: float, base: float, high: float) -> tuple[tuple[float, float], ...]:
    """A Bezier curve that leaves and arrives upright, with its top `high` above `base`."""
    points = []
    for i in range(_CURVE_POINTS + 1):
        t = i / _CURVE_POINTS
        across = start + (end - start) * (3 * t * t - 2 * t**3)
        points.append((across, base - high * 4 * t * (1 - t)))
    return tuple(points)


def save(shapes: Sequence[Shape], *, width: float, height: float, path: Path) -> None:
    """Write the picture, as its name's ending says.

    Raises:
        TopologyError: the name ends neither in .svg nor in .png, Pillow is missing, or the file cannot be written.
    """
    try:
        if path.suffix == ".svg":
            path.write_text(svg(shapes, width=width, height=height), encoding="utf-8")
        elif path.suffix == ".png":
            _png(shapes, width=width, height=height).save(path, format="PNG")
        else:
            raise TopologyError(f"{path}: a picture's name ends in .svg or .png")
    except OSError as error:
        raise TopologyError(f"{path}: cannot be written: {error.strerror or error}") from None


def svg(shapes: Sequence[Shape], *, width: float, height: float) -> str:
    """The picture as the text of an SVG file."""
    from html import escape

    size = f'width="{width:g}" height="{height:g}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{escape(_FONT)}">',
        f'<rect {size} fill="#ffffff"/>',
    ]
    for shape in shapes:
        match shape:
            case Box():
                lines.append(
                    f'<rect x="{shape.x:g}" y="{shape.y:g}" width="{shape.width:g}" height="{shape.height:g}" '
                    f'rx="{shape.radius:g}" fill="{shape.fill}" stroke="{shape.stroke}"/>'
                )
            case Line():
                points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
                lines.append(
                    f'<polyline points="{points}" fill="none" stroke="{shape.color}" '
                    f'stroke-width="{shape.width:g}" stroke-linejoin="round"/>'
                )
            case Text():
                text = escape("".join(letter if letter.isprintable() else "?" for letter in shape.text))
                lines.append(
                    f'<text x="{shape.x:g}" y="{shape.y:g}" dy="0.35em" font-size="{shape.size:g}" '
                    f'text-anchor="{"start" if shape.left else "middle"}" fill="{shape.color}" '
                    f'font-weight="{"bold" if shape.bold else "normal"}">{text}</text>'
                )
    return "\n".join([*lines, "</svg>\n"])


def _png(shapes: Sequence[Shape], *, width: float, height: float) -> Any:
    try:
        from PIL import Image, ImageDraw
    except ImportError:
        raise TopologyError("a PNG needs Pillow, which is not installed here; write an .svg instead") from None
    scale = _PNG_SCALE * _SMOOTH
    image = Image.new("RGB", (round(width * scale), round(height * scale)), "white")
    draw = ImageDraw.Draw(image)
    for shape in shapes:
        match shape:
            case Box():
                corners = [shape.x, shape.y, shape.x + shape.width, shape.y + shape.height]
                draw.rounded_rectangle(
                    [corner * scale for corner in corners],
                    radius=shape.radius * scale,
                    fill=shape.fill,
                    outline=shape.stroke,
                    width=scale,
                )
            case Line():
                points = [(x * scale, y * scale) for x, y in shape.points]
                draw.line(points, fill=shape.color, width=round(shape.width * scale), joint="curve")
            case Text():
                _write(draw, shape, scale)
    return image.resize((round(width * _PNG_SCALE), round(height * _PNG_SCALE)), Image.Resampling.LANCZOS)


def _write(draw: Any, words: Text, scale: int) -> None:
    from PIL import ImageFont

    draw.text(
        (words.x * scale, words.y * scale),
        words.text,
        fill=words.color,
        font=ImageFont.load_default(words.size * scale),
        anchor="lm" if words.left else "mm",
        stroke_width=scale * words.size / 40 if words.bold else 0,
    )
