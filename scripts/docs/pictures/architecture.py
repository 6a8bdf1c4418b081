"""From the command to the run folder."""

from scripts.docs.pictures.canvas import Canvas


def draw() -> str:
    """Draw hvdlaunch, mpirun, the binding of a rank, ranks on two hosts, and the run folder."""
    canvas = Canvas(
        760, 512, "hvdlaunch probes hosts and starts ranks; ranks train with Horovod and write the run folder"
    )
    canvas.box(24, 24, 712, 104, kind="blue")
    canvas.text(44, 46, "hvdlaunch run", bold=True, anchor="start", size=16)
    canvas.text(716, 46, "package launch, without torch", anchor="end", ink="soft", size=13)
    steps = ("probe hosts", "choose GPUs", "place ranks", "write the plan", "supervise")
    for number, step in enumerate(steps):
        x = 44 + number * 137
        canvas.box(x, 70, 116, 40, step, kind="ground")
        if number:
            canvas.arrow((x - 20, 90), (x - 2, 90))
    canvas.arrow((380, 128), (380, 160))
    canvas.text(392, 144, "one command, over ssh or srun", anchor="start", ink="soft", size=13)
    canvas.box(270, 162, 220, 34, "mpirun or horovodrun", kind="plain", bold=True)
    for host, (left, ranks) in enumerate(((24, (0, 1)), (392, (2, 3))), start=1):
        canvas.arrow((330 if host == 1 else 430, 196), (left + 172, 232))
        canvas.box(left, 234, 344, 150, kind="plain")
        canvas.text(left + 16, 252, f"host h{host}", bold=True, anchor="start")
        for place, rank in enumerate(ranks):
            x = left + 16 + place * 160
            canvas.box(x, 268, 152, 36, f"bind: GPU {place}, its cores", kind="blue", size=12.5)
            canvas.arrow((x + 76, 304), (x + 76, 324))
            canvas.box(x, 326, 152, 44, f"rank {rank}", "hvdtrain.effnet", kind="green", size=12.5, bold=True)
    canvas.line((368, 348), (392, 348), ink="green", width=4)
    canvas.text(380, 400, "Horovod: all-reduce of gradients over MPI or NCCL", ink="green", size=13)
    for x in (180, 580):
        canvas.arrow((x, 384), (x, 426))
    canvas.text(172, 412, "write", anchor="end", ink="soft", size=13)
    canvas.text(588, 412, "write", anchor="start", ink="soft", size=13)
    canvas.box(24, 428, 712, 60, kind="orange")
    canvas.text(44, 447, "run folder", bold=True, anchor="start", size=16)
    canvas.text(
        44,
        471,
        "config.json   metrics.jsonl   TensorBoard   checkpoints/   ranks/   result.json",
        anchor="start",
        size=13,
    )
    canvas.arrow((736, 458), (748, 458), (748, 90), (738, 90), ink="orange")
    canvas.text(716, 447, "hvdlaunch reads progress and the newest checkpoint", anchor="end", ink="soft", size=13)
    return canvas.svg()
