"""Traffic between two hosts: flat, two-level, local."""

from scripts.docs.pictures.canvas import Canvas

PANELS = (
    ("flat", "--sync flat", "gradients of all ranks,", "at every step; MPI or NCCL", "decides how often each crosses"),
    ("two-level", "--sync two-level", "each gradient once per host", "and direction, at every step", ""),
    (
        "local",
        "--sync local:16",
        "parameters and the optimizer's",
        "state, every 16 steps:",
        "not the result of flat",
    ),
)


def draw() -> str:
    """Draw three panels of two hosts with four ranks each."""
    canvas = Canvas(760, 450, "Flat, two-level and local synchronization of two hosts with four ranks each")
    for panel, (title, option, *below) in enumerate(PANELS):
        x = 24 + panel * 242
        canvas.text(x + 114, 32, title, bold=True, size=15)
        canvas.text(x + 114, 54, option, code=True, size=11.5, ink="soft")
        ranks = [(x + 39 + place % 4 * 50, 130 if place < 4 else 290) for place in range(8)]
        canvas.box(x, 76, 228, 88, kind="plain")
        canvas.box(x, 256, 228, 88, kind="plain")
        canvas.text(x + 12, 92, "host h1", anchor="start", size=12, ink="soft")
        canvas.text(x + 12, 330, "host h2", anchor="start", size=12, ink="soft")
        if panel == 0:
            ring = [*ranks[:4], *reversed(ranks[4:]), ranks[0]]
            canvas.line(*ring, ink="green", width=3)
        else:
            for host in (ranks[:4], ranks[4:]):
                canvas.line(host[0], host[-1], ink="green", width=3)
            canvas.arrow((x + 114, 162), (x + 114, 258), ink="orange", width=4, both=True, dashed=panel == 2)
        canvas.text(x + (114 if panel == 0 else 168), 210, "slow link", size=12.5, ink="soft")
        for number, (rank_x, rank_y) in enumerate(ranks):
            canvas.circle(rank_x, rank_y, 15, str(number), kind="ground", size=13)
        for number, line in enumerate(below):
            canvas.text(x + 114, 368 + number * 18, line, size=12.5)
    canvas.text(
        380, 432, "green: all-reduce at every step; orange: between the sums or means of hosts", ink="soft", size=12
    )
    return canvas.svg()
