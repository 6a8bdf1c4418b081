"""A model on four ranks: replicas, stages, slices."""

from scripts.docs.pictures.canvas import Canvas, Kind

LAYERS = 4


def draw() -> str:
    """Draw three panels of four ranks each."""
    canvas = Canvas(760, 420, "Four ranks as four replicas, or as two replicas of two stages or slices")
    titles = ("4 replicas", "2 replicas x 2 stages", "2 replicas x 2 slices")
    options = ("the default", "--stages 2", "--tensor 2")
    for panel, (title, option) in enumerate(zip(titles, options, strict=True)):
        x = 24 + panel * 242
        canvas.text(x + 114, 32, title, bold=True, size=15)
        canvas.text(x + 114, 54, option, code=panel > 0, size=13, ink="soft")
        for rank in range(4):
            _rank(canvas, x + 6 + rank % 2 * 114, 84 + rank // 2 * 146, rank, panel)
        if panel:
            for top in (78, 224):
                canvas.frame(x, top, 228, 128)
    _exchanges(canvas)
    return canvas.svg()


def _rank(canvas: Canvas, x: float, y: float, rank: int, panel: int) -> None:
    canvas.box(x, y, 102, 116, kind="ground")
    canvas.text(x + 51, y + 102, f"rank {rank}", size=12.5)
    is_second = rank % 2 == 1
    for layer in range(LAYERS):
        kind: Kind = "blue" if layer < LAYERS / 2 else "violet"
        top, left, width = y + 10 + layer * 21, x + 12, 78.0
        here = panel != 1 or (layer >= LAYERS / 2) == is_second
        if panel == 2:
            width, left = 39.0, left + 39 * is_second
        if here:
            canvas.box(left, top, width, 15, kind=kind, radius=2)


def _exchanges(canvas: Canvas) -> None:
    canvas.text(138, 384, "all-reduce of all gradients", size=12.5)
    canvas.text(138, 402, "between the 4 ranks", size=12.5)
    for left, text in ((266, "activations from stage to stage,"), (508, "sums of activations in each layer,")):
        canvas.text(left + 114, 384, text, size=12.5, ink="orange")
        canvas.text(left + 114, 402, "gradients between equal parts", size=12.5, ink="green")
    for y in (142, 288):
        canvas.arrow((368, y), (386, y), ink="orange", width=2.5)
        canvas.arrow((611, y), (629, y), ink="orange", width=2.5, both=True)
        canvas.arrow((126, y), (146, y), ink="green", width=2.5, both=True)
    for x in (81, 195, 323, 437, 565, 679):
        canvas.arrow((x, 201), (x, 229), ink="green", width=2.5, both=True)
