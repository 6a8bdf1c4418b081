"""A decision tree: which option for which problem."""

from scripts.docs.pictures.canvas import Canvas, Kind

# Problem; then conditions with the option to use.
TREE: tuple[tuple[str, Kind, tuple[tuple[str, str], ...]], ...] = (
    (
        "A rank or a host may die",
        "red",
        (("any machine", "--restarts 3"),),
    ),
    (
        "The model does not fit",
        "violet",
        (
            ("does it? no GPU needed", "--dry-run a100"),
            ("its activations are too large", "--recompute"),
            ("weights, gradients, optimizer", "--stages 2"),
            ("a BERT on GPUs with NVLink", "--tensor 2"),
        ),
    ),
    (
        "Steps are slow",
        "blue",
        (
            ("the reason is not known", "--profile=exact"),
            ("the best options are not known", "hvdlaunch tune"),
            ("network up to 100 Mbit/s", "--compression powersgd:2"),
            ("still too slow", "--sync local:16"),
            ("a host sends too often", "--sync two-level"),
        ),
    ),
    (
        "Accuracy falls with more ranks",
        "orange",
        (
            ("rate and warm-up should follow", "--recipe scaled"),
            ("batches must stay the same", "--global-batch-size 256"),
            ("few images per rank", "--sync-bn"),
        ),
    ),
    (
        "How many GPUs?",
        "green",
        (
            ("before you rent", "hvdlaunch estimate"),
            ("on the machine", "hvdlaunch sweep"),
        ),
    ),
)
ROW = 34.0


def draw() -> str:
    """Draw the tree from left to right."""
    rows = sum(len(cases) for _, _, cases in TREE)
    canvas = Canvas(760, rows * ROW + (len(TREE) - 1) * 12 + 76, "Problems, conditions, and the option for each")
    for x, title in ((118, "problem"), (366, "condition"), (612, "option")):
        canvas.text(x, 28, title, ink="soft", size=13)
    top = 46.0
    for problem, kind, cases in TREE:
        height = len(cases) * ROW
        middle = top + height / 2
        canvas.box(20, middle - 19, 206, 38, problem, kind=kind, size=13)
        for number, (condition, option) in enumerate(cases):
            y = top + ROW / 2 + number * ROW
            canvas.line((226, middle), (240, middle), (240, y), (254, y))
            canvas.box(254, y - 13, 226, 26, condition, kind="plain", size=12.5)
            canvas.arrow((480, y), (502, y))
            canvas.box(504, y - 13, 236, 26, kind=kind)
            canvas.text(622, y, option, code=True, size=11.5)
        top += height + 12
    return canvas.svg()
