"""Buckets of gradients in flight during the backward pass."""

from scripts.docs.pictures.canvas import Canvas

LEFT = 120.0


def draw() -> str:
    """Draw a step without overlap above one with buckets."""
    canvas = Canvas(760, 330, "An all-reduce after the backward pass, and one in buckets beside it")
    _after(canvas, 24)
    _beside(canvas, 168)
    canvas.arrow((LEFT, 304), (736, 304))
    canvas.text(LEFT - 14, 304, "time", anchor="end", ink="soft", size=13)
    return canvas.svg()


def _lanes(canvas: Canvas, top: float, title: str) -> tuple[float, float]:
    canvas.text(24, top + 10, title, anchor="start", bold=True, size=15)
    for y, name in ((top + 44, "compute"), (top + 84, "network")):
        canvas.text(LEFT - 14, y, name, anchor="end", size=13)
    return top + 30, top + 70


def _after(canvas: Canvas, top: float) -> None:
    compute, network = _lanes(canvas, top, "One sum after the backward pass")
    canvas.box(LEFT, compute, 110, 28, "forward", kind="blue", size=13)
    canvas.box(LEFT + 114, compute, 220, 28, "backward, layers 4 to 1", kind="blue", size=13)
    canvas.box(LEFT + 338, network, 190, 28, "all gradients", kind="green", size=13)
    canvas.frame(LEFT + 338, compute, 190, 28, "waiting", size=13)
    canvas.box(LEFT + 532, compute, 84, 28, "optimizer", kind="violet", size=13)


def _beside(canvas: Canvas, top: float) -> None:
    compute, network = _lanes(canvas, top, "Buckets: a sum begins when the last gradient of its bucket is there")
    canvas.box(LEFT, compute, 110, 28, "forward", kind="blue", size=13)
    ends = [LEFT + 114 + part * 55 for part in range(1, 5)]
    for number, end in enumerate(ends, start=1):
        canvas.box(end - 55, compute, 53, 28, f"layer {5 - number}", kind="blue", size=12)
    start = ends[0]
    for number, end in enumerate(ends, start=1):
        start = max(start, end)
        width = 26.0 if number == 1 else 56.0
        name = "1" if number == 1 else f"bucket {number}"
        canvas.box(start, network, width - 2, 28, name, kind="green", size=11.5)
        canvas.arrow((end - 1, compute + 28), (end - 1 if start == end else start + 8, network - 1), width=1)
        start += width
    canvas.frame(ends[-1] + 2, compute, start - ends[-1] - 4, 28, "wait", size=12)
    canvas.box(start + 2, compute, 84, 28, "optimizer", kind="violet", size=13)
