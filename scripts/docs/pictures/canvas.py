"""Boxes, arrows and text -> an SVG that follows the reader's light or dark mode."""

from collections.abc import Sequence
from html import escape
from typing import Literal

Kind = Literal["plain", "ground", "blue", "green", "orange", "red", "violet", "none"]
Point = tuple[float, float]

_FONT = "Helvetica, Arial, 'DejaVu Sans', sans-serif"
_INKS = {  # light, dark
    "ink": ("#1f2933", "#e6e9ec"),
    "soft": ("#55636f", "#a3afba"),
    "line": ("#75838f", "#8593a0"),
}
_FILLS = {  # fill and stroke, light; then dark
    "ground": ("#ffffff", "#d5dce3", "#15181c", "#343c44"),
    "plain": ("#f2f5f8", "#b9c5d0", "#20262c", "#4a5661"),
    "blue": ("#e1edfb", "#3875b8", "#17304a", "#62a0e2"),
    "green": ("#dcf2ea", "#0f7b6c", "#11362f", "#45bba4"),
    "orange": ("#fff0d9", "#b9650f", "#422c10", "#e9a356"),
    "red": ("#fde3e1", "#b93a2c", "#481e1b", "#ee7468"),
    "violet": ("#eee5f7", "#7a4aa5", "#302243", "#b792dc"),
}


def _style() -> str:
    """Return variables for both modes, and the classes that use them."""
    light = [f"--{name}:{inks[0]}" for name, inks in _INKS.items()]
    dark = [f"--{name}:{inks[1]}" for name, inks in _INKS.items()]
    for name, (fill, stroke, dark_fill, dark_stroke) in _FILLS.items():
        light += [f"--{name}-f:{fill}", f"--{name}-s:{stroke}"]
        dark += [f"--{name}-f:{dark_fill}", f"--{name}-s:{dark_stroke}"]
    classes = [f".{name}{{fill:var(--{name}-f);stroke:var(--{name}-s)}}" for name in _FILLS]
    classes += [f".l-{name}{{fill:none;stroke:var(--{name}-s)}} .t-{name}{{fill:var(--{name}-s)}}" for name in _FILLS]
    classes += [f".t-{name}{{fill:var(--{name})}} .l-{name}{{fill:none;stroke:var(--{name})}}" for name in _INKS]
    classes += [".none{fill:none;stroke:none}"]
    media = f"@media (prefers-color-scheme: dark){{svg{{{';'.join(dark)}}}}}"
    return f"<style>svg{{{';'.join(light)}}}\n{media}\n{' '.join(classes)}</style>"


class Canvas:
    """A picture under construction; lengths in pixels."""

    def __init__(self, width: float, height: float, title: str) -> None:
        size = f'viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}"'
        begin = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img" font-family="{escape(_FONT)}">'
        self._parts = [begin, f"<title>{escape(title)}</title>", _style()]
        self.box(0.5, 0.5, width - 1, height - 1, kind="ground", radius=10)

    def svg(self) -> str:
        """Return the text of the file."""
        return "\n".join([*self._parts, "</svg>\n"])

    def add(self, part: str) -> None:
        """Add SVG text unchanged."""
        self._parts.append(part)

    def box(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        *lines: str,
        kind: Kind = "plain",
        size: float = 14,
        radius: float = 6,
        dashed: bool = False,
        bold: bool = False,
    ) -> None:
        """Add a rectangle with lines of text in its middle; the first may be bold."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.add(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius:g}"{dash}/>'
        )
        step = size * 1.3
        top = y + height / 2 - step * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + number * step, line, size=size, bold=bold and number == 0)

    def frame(self, x: float, y: float, width: float, height: float, *lines: str, size: float = 14) -> None:
        """Add a dashed rectangle without a background, with lines of text in its middle."""
        self.add(
            f'<rect class="l-line" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" '
            'stroke-dasharray="5 4"/>'
        )
        self.box(x, y, width, height, *lines, kind="none", size=size)

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = 14,
        ink: str = "ink",
        anchor: Literal["start", "middle", "end"] = "middle",
        bold: bool = False,
        code: bool = False,
    ) -> None:
        """Add a line of text, vertically centred."""
        weight = ' font-weight="bold"' if bold else ""
        font = " font-family=\"'DejaVu Sans Mono', Menlo, Consolas, monospace\"" if code else ""
        self.add(
            f'<text class="t-{ink}" x="{x:g}" y="{y:g}" dy="0.35em" font-size="{size:g}" text-anchor="{anchor}"'
            f'{weight}{font} xml:space="preserve">{escape(text, quote=False)}</text>'
        )

    def line(self, *points: Point, ink: str = "line", width: float = 1.5, dashed: bool = False) -> None:
        """Add a line through points."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.add(f'<polyline class="l-{ink}" points="{path}" stroke-width="{width:g}" stroke-linejoin="round"{dash}/>')

    def arrow(
        self, *points: Point, ink: str = "line", width: float = 1.5, both: bool = False, dashed: bool = False
    ) -> None:
        """Add a line with an arrow head at its end, or at both ends."""
        self.line(*points, ink=ink, width=width, dashed=dashed)
        self._head(points[-2], points[-1], ink)
        if both:
            self._head(points[1], points[0], ink)

    def _head(self, start: Point, end: Point, ink: str) -> None:
        (x0, y0), (x1, y1) = start, end
        length = ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5
        ux, uy = (x1 - x0) / length, (y1 - y0) / length
        corners: Sequence[Point] = (
            (x1, y1),
            (x1 - 9 * ux + 4.5 * uy, y1 - 9 * uy - 4.5 * ux),
            (x1 - 9 * ux - 4.5 * uy, y1 - 9 * uy + 4.5 * ux),
        )
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in corners)
        self.add(f'<polygon class="t-{ink}" points="{path}"/>')

    def circle(
        self, x: float, y: float, radius: float, text: str = "", *, kind: Kind = "plain", size: float = 14
    ) -> None:
        """Add a circle with a word in it."""
        self.add(f'<circle class="{kind}" cx="{x:g}" cy="{y:g}" r="{radius:g}" stroke-width="1.5"/>')
        if text:
            self.text(x, y, text, size=size, bold=True)
