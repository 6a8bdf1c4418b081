"""Run folders and studies as hvdtrain and hvdlaunch leave them, without running anything."""

import json

CONFIG = {"data": "digits", "model": "efficientnet_tiny", "batch_size_per_rank": 64, "lr": None, "scale_lr": True}
ENVIRONMENT = {"host": "one", "torch": "2.11.0", "commit": "abc1234", "horovod_settings": {}, "nccl_settings": {}}


def make_run(
    folder,
    *,
    np=2,
    seed=0,
    accuracy=0.97,
    speed=1000.0,
    metric="accuracy",
    hosts=("one",),
    device="cpu",
    threads=1,
    **changes,
):
    """A finished run of 4 epochs; `result`, `config` and `environment` change single entries, None removes one."""
    folder.mkdir(parents=True)
    steps_per_epoch, time_s = -(-1440 // (64 * np)), 4 * 1440 / speed
    lines = [{"event": "spike", "step": 3, "train/loss": 1e9}]
    for epoch in range(1, 5):
        at = {"step": epoch * steps_per_epoch, "seconds": round(time_s * epoch / 4, 3)}
        lines.append({**at, "train/loss": 2.4 - 0.5 * epoch, "train/lr": 0.1})
        lines.append({**at, "epoch": epoch, f"eval/{metric}": accuracy - 0.1 * (4 - epoch), "eval/loss": 0.1})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    result = {
        "np": np,
        "hosts": hosts,
        "global_batch": 64 * np,
        "steps": 4 * steps_per_epoch,
        "wall_time_s": time_s + 1,
        "train_images_per_s": speed,
        f"eval_{metric}": accuracy,
        f"best_{metric}": accuracy,
        "eval_loss": 0.1,
        "skipped_steps": 0,
        "memory": {"resident_mib": 612.4, "resident_rank": 1},
        "exit_reason": "finished",
        **changes.get("result", {}),
    }
    own = {"seed": seed, "run": folder.name, "runs_dir": str(folder.parent), "experiment": "x", "overwrite": False}
    own["export"] = str(folder / "export")
    derived = {
        "global_batch": 64 * np,
        "micro_batch": 64,
        "steps_per_epoch": steps_per_epoch,
        "steps": 5 * steps_per_epoch,
    }
    of_rank = {"device": device, "threads": threads}
    ranks = [{"rank": rank, "host": hosts[rank % len(hosts)], **of_rank} for rank in range(np)]
    documents = {
        "config": {**CONFIG, **own, "derived": derived, **changes.get("config", {})},
        "environment": {**ENVIRONMENT, "command": [folder.name], **changes.get("environment", {})},
        "placement": {"ranks": ranks, "plan": None},
        "result": {name: value for name, value in result.items() if value is not None},
    }
    for name, document in documents.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return folder


def make_study(folder, rows, **changes):
    """A sweep.json of these (np, seed, run folder or None, why or None)."""
    runs = [
        {"np": np, "seed": seed, "status": int(why is not None), "run_folder": run and str(run), "why": why}
        for np, seed, run, why in rows
    ]
    known = {"program": ["python", "-m", "hvdtrain.effnet"], "mode": "weak", "sizes": [row[0] for row in rows]}
    folder.mkdir(parents=True)
    (folder / "sweep.json").write_text(json.dumps({**known, "runs": runs, **changes}))
    return folder / "sweep.json"


def two_recipes(folder, *, apart=0.02, **more):
    """Three seeds each of recipes whose accuracy is so far apart."""
    for seed, noise in enumerate((0.0, 0.002, -0.002)):
        make_run(folder / f"a-seed{seed}", seed=seed, accuracy=0.96 + noise, speed=1000 + seed, **more)
        make_run(folder / f"b-seed{seed}", seed=seed, accuracy=0.96 + apart + noise, config={"lr": 0.5}, **more)
    return folder


def three_sizes(folder, name="s", *, metric="accuracy", **changes):
    """A study of 1, 2 and 4 ranks at 1000, 1800 and 2400 images/s, two seeds each."""
    runs = []
    for np, speed, accuracy in ((1, 1000, 0.97), (2, 1800, 0.968), (4, 2400, 0.95)):
        for seed in (0, 1):
            run = folder / f"runs/np{np}-seed{seed}"
            make_run(run, np=np, seed=seed, speed=speed, accuracy=accuracy + 0.001 * seed, metric=metric)
            runs.append((np, seed, run, None))
    return make_study(folder / "sweeps" / name, runs, **changes)


def table_rows(text):
    """Each row of a Markdown table, by the titles of its columns."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]
