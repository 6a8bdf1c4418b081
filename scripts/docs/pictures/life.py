"""A run that loses a rank, on a time line: with --restarts, and in place."""

from scripts.docs.pictures.canvas import Canvas, Kind

LEFT, LANE, BAR = 110.0, 34.0, 22.0


def draw() -> str:
    """Draw two panels of three ranks; rank 1 dies at step 60."""
    canvas = Canvas(760, 452, "Rank 1 dies at step 60: all ranks restart, or the others continue in place")
    _restarts(canvas, 24)
    _in_place(canvas, 236)
    canvas.text(380, 434, "not to scale; medians of 20 kills of one of 3 ranks on 2 CPU cores", ink="soft", size=12)
    return canvas.svg()


def _lane(canvas: Canvas, top: float, rank: int) -> float:
    y = top + 40 + rank * LANE
    canvas.text(LEFT - 14, y + BAR / 2, f"rank {rank}", anchor="end")
    return y


def _bar(canvas: Canvas, y: float, ends: tuple[float, float], text: str, kind: Kind = "green") -> None:
    start, end = ends
    canvas.box(start, y, end - start, BAR, text, kind=kind, size=12.5, radius=3, dashed=kind == "plain")


def _death(canvas: Canvas, x: float, y: float) -> None:
    middle = y + BAR / 2
    for slope in (1, -1):
        canvas.line((x - 8, middle - 8 * slope), (x + 8, middle + 8 * slope), ink="red", width=3.5)


def _restarts(canvas: Canvas, top: float) -> None:
    canvas.text(24, top + 10, "--restarts 3", bold=True, anchor="start", size=16, code=True)
    canvas.text(190, top + 10, "the newest checkpoint, on any number of hosts", ink="soft", anchor="start", size=13)
    base = top + 40 + 3 * LANE
    for x, step in ((172, 20), (290, 40)):
        canvas.line((x, top + 34), (x, base + 2), ink="violet", width=2)
        canvas.text(x, base + 14, f"checkpoint {step}", ink="violet", size=12.5)
    for rank in range(3):
        y = _lane(canvas, top, rank)
        _bar(canvas, y, (LEFT, 350), "steps 1 to 60")
        _bar(canvas, y, (358, 528), "restart: 12 to 14 s", "plain")
        _bar(canvas, y, (534, 606), "41 to 60", "orange")
        _bar(canvas, y, (606, 736), "steps 61 ...")
    _death(canvas, 350, top + 40 + LANE)
    canvas.arrow((344, base + 14), (534, base + 14), (534, base - 10), ink="violet", dashed=True)
    canvas.text(430, base + 28, "resumes from step 40, with the same bits", ink="violet", size=12.5)


def _in_place(canvas: Canvas, top: float) -> None:
    canvas.text(24, top + 10, "--elastic --grow", bold=True, anchor="start", size=16, code=True)
    canvas.text(
        224, top + 10, "in place, without the checkpoint: Open MPI 5, CPUs", ink="soft", anchor="start", size=13
    )
    for rank in (0, 2):
        y = _lane(canvas, top, rank)
        _bar(canvas, y, (LEFT, 350), "steps 1 to 60")
        _bar(canvas, y, (374, 560), "2 ranks share the batches")
        _bar(canvas, y, (584, 736), "3 ranks again")
    y = _lane(canvas, top, 1)
    _bar(canvas, y, (LEFT, 350), "steps 1 to 60")
    _death(canvas, 350, y)
    _bar(canvas, y, (390, 560), "rank 3 starts, imports", "plain")
    _bar(canvas, y, (584, 736), "rank 3 instead of 1")
    base = top + 40 + 3 * LANE
    canvas.text(362, base + 12, "recover: 0.5 to 0.7 s", ink="orange", size=12.5)
    canvas.text(572, base + 12, "join", ink="orange", size=12.5)
    for x in (354, 564):
        canvas.box(x, top + 36, 16, 3 * LANE - 4, kind="orange", radius=3)
