"""A run with --restarts that loses a rank, on a time line."""

from scripts.docs.pictures.canvas import Canvas, Kind

LEFT, TOP, LANE, BAR = 110.0, 64.0, 34.0, 22.0


def draw() -> str:
    """Draw three ranks; rank 1 dies at step 60."""
    canvas = Canvas(760, 240, "Rank 1 dies at step 60: all ranks restart from the newest state")
    canvas.text(24, 34, "--restarts 3", bold=True, anchor="start", size=16, code=True)
    about = "the newest state, in memory or on disk, on any number of hosts"
    canvas.text(190, 34, about, ink="soft", anchor="start", size=13)
    base = TOP + 3 * LANE
    for x, text in ((212, "checkpoint 40"), (318, "snapshot 58")):
        canvas.line((x, TOP - 6), (x, base + 2), ink="violet", width=2)
        canvas.text(x, base + 14, text, ink="violet", size=12.5)
    for rank in range(3):
        y = TOP + rank * LANE
        canvas.text(LEFT - 14, y + BAR / 2, f"rank {rank}", anchor="end")
        _bar(canvas, y, (LEFT, 350), "steps 1 to 60")
        _bar(canvas, y, (358, 528), "restart: 1 s", "plain")
        _bar(canvas, y, (534, 606), "59, 60", "orange")
        _bar(canvas, y, (606, 736), "steps 61 ...")
    middle = TOP + LANE + BAR / 2
    for slope in (1, -1):
        canvas.line((342, middle - 8 * slope), (358, middle + 8 * slope), ink="red", width=3.5)
    canvas.arrow((362, base + 14), (534, base + 14), (534, base - 10), ink="violet", dashed=True)
    canvas.text(430, base + 28, "resumes from step 58, with the same bits", ink="violet", size=12.5)
    canvas.text(380, 222, "not to scale; median of 65 kills of one of 2 or 3 ranks on 2 CPU cores", ink="soft", size=12)
    return canvas.svg()


def _bar(canvas: Canvas, y: float, ends: tuple[float, float], text: str, kind: Kind = "green") -> None:
    start, end = ends
    canvas.box(start, y, end - start, BAR, text, kind=kind, size=12.5, radius=3, dashed=kind == "plain")
