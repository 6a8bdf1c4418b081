"""Put the outputs of a quarter on a GPU where they belong: python -m bench.gpu_results OUTPUT [LATER OUTPUT].

Writes gpu-steps.json and gpu-dry-run.json of bench/results, the measured column of gpu-predictions.json there, and the
GPU column of docs/reference/tested.md. A step that was not OK is judged again, by today's check, from the files that
came back.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.quarter.driver import Step, judge
from bench.quarter.steps import SHAPES, schedule
from bench.quarter.steps import measured as measured_by
from hvdtrain.insight.costs.devices import DEVICES

ROOT = Path(__file__).resolve().parents[1]
RESULTS, TESTED = ROOT / "bench/results", ROOT / "docs/reference/tested.md"
NOT_RUN = ("NO TIME", "NO GPU")
# Rows of tested.md that a GPU has run if all these steps are OK, or had ended their training.
ROWS = {
    "`hvdtrain.effnet`, `hvdtrain.bert`": ("start", "gpu-tests"),
    "fp16, bf16, `--profile`": ("gpu-tests", "profile"),
    "`--stages`": ("two-stages",),
    "`--reducer bucket`, `--sync-bn`": ("two-bucket", "two-sync-bn"),
    "`--shard-optimizer`": ("two-sharded",),
    "`--reducer horovod`, `--compression fp16`, `--sync two-level`": ("two-horovod", "two-two-level"),
    "`--compile`": ("pair-compiled",),
    "checkpoint and resume": ("gpu-tests",),
    "save on SIGTERM or SIGUSR1": ("term",),
    "`--dry-run`": ("shape-b0", "shape-bert-base", "shape-bert-large"),
    "`run`, `plan`, Open MPI 4": ("start", "launcher"),
    "`gpus`, `topo`": ("launcher",),
    "`check`": ("launcher",),
}
CARD = re.compile(r"^GPU: .*\n(?:.+\n)*", re.MULTILINE)
Row = dict[str, Any]


def collect(outputs: list[Path]) -> dict[str, Row]:
    """Return the rows of all steps that have run, by name; a later output replaces an earlier one."""
    rows: dict[str, Row] = {}
    for output in outputs:
        with TemporaryDirectory() as work:
            (Path(work) / "steps").mkdir()
            subprocess.run(["tar", "-xzf", output / "runs.tar.gz", "-C", f"{work}/steps"], check=True)
            phases = schedule(ROOT, Path(work), output, small=False)
            steps = {step.name: step for lanes in phases for lane in lanes for step in lane}
            logs = logs_of(output / "logs.txt")
            for row in map(json.loads, (output / "steps.jsonl").read_text().splitlines()):
                step = steps.get(row["step"])
                if row["state"] not in NOT_RUN and not (step and is_reference(step)):
                    rows[row["step"]] = judged(row, step, Path(work) / "steps", logs[row["step"]])
    return rows


def is_reference(step: Step) -> bool:
    """Return whether a step shows nothing of a GPU."""
    return step.check is None or step.env.get("CUDA_VISIBLE_DEVICES") == ""


def logs_of(path: Path) -> dict[str, str]:
    """Return the output of each step."""
    parts = re.split(r"^##### ([\w-]+): .*\n", path.read_text(), flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def judged(row: Row, step: Step | None, steps: Path, output: str) -> Row:
    """Return a row with the verdict of the step's check; a step that has met its limit stays so."""
    if step is None or row["state"] in ("OK", "FAILED"):
        return row
    state, figures = judge(step, steps / step.name, output, step.status or 0, 0.0)
    if row["state"] == "LIMIT":
        return row | ({"figures": figures} if state == "OK" else {})
    return row | {"state": state, "figures": figures}


def short(figures: Any) -> str:
    """Return the numbers and words of figures that stand in one cell."""
    if not isinstance(figures, dict):
        return figures if isinstance(figures, str) else f"{len(figures)} lines"
    return ", ".join(f"{name} {text}".strip() for name, value in _flat(figures) if (text := _text(value)))


def _flat(figures: dict[str, Any], start: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in figures.items():
        if isinstance(value, dict):
            yield from _flat(value, start if name == "memory" else f"{start}{name} ")
        elif name == "rows":
            for row in value:
                yield "", " ".join(map(_text, row.values()))
        else:
            yield f"{start}{name}", value


def _text(value: Any) -> str:
    """Return a number, a word or a few numbers as text; nothing for anything else."""
    if isinstance(value, list) and len(value) <= 3:
        return " / ".join(map(_text, value)) if all(isinstance(one, int | float) for one in value) else ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value) if isinstance(value, int | str) else ""


def measured(rows: dict[str, Row], where: str) -> float | None:
    """Return the figure at `STEP: NAME.NAME`; None if the step has not shown it."""
    step, _, path = where.partition(": ")
    row = rows.get(step)
    if row is None or row["state"] not in ("OK", "WRONG"):
        return None
    value: Any = {**row["figures"], "s": row["s"]} if isinstance(row["figures"], dict) else {"s": row["s"]}
    while path:
        if isinstance(value, list):
            name, _, path = path.partition(".")
            value = value[int(name)] if int(name) < len(value) else {}
            continue
        names = [name for name in value if path == name or path.startswith(f"{name}.")]
        if not names:
            return None
        value, path = value[names[0]], path[len(names[0]) + 1 :]
    return float(value) if isinstance(value, int | float) else None


def with_rows(document: Row, rows: list[Row]) -> str:
    """Return a result of bench/results: one line for each row."""
    head = json.dumps({name: value for name, value in document.items() if name != "rows"}, indent=2)[:-2]
    lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
    return f'{head},\n  "rows": [\n{lines}\n  ]\n}}\n'


def compare(document: Row, rows: dict[str, Row]) -> str:
    """Return the predictions with what was measured."""
    for row in document["rows"]:
        value = measured(rows, row["where"])
        row["measured"] = None if value is None else float(f"{value:.4g}")
        row["inside"] = None if value is None else "yes" if row["low"] <= value <= row["high"] else "no"
    known = [row["inside"] for row in document["rows"] if row["inside"]]
    document["about"] = {"inside": f"{known.count('yes')} of the {len(known)} that were measured"}
    return with_rows(document, document["rows"])


def next_to_dry_run(rows: dict[str, Row], device: str) -> list[Row]:
    """Return memory and time of each shape that was measured, next to what --dry-run expects of this device."""
    found = []
    for name, shape in SHAPES.items():
        row = rows.get(f"shape-{name}")
        if row is None or row["state"] != "OK":
            continue
        command = measured_by("side", name="ours", words=f"--dry-run json,{device}", **shape)
        output = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        counted = json.loads(next(line for line in output.splitlines() if line.startswith('{"dry_run"')))
        [expected] = counted["devices"]
        ms = {part: round(1000 * expected[f"{part}_s"], 1) for part in ("step", "low", "high")}
        counted_mib, peak_mib = counted["memory_bytes"]["total"] / 2**20, row["figures"]["memory"]["gpu_allocated_mib"]
        found.append(
            {
                "shape": " ".join(str(value) for value in shape.values()),
                "counted, GiB": round(counted_mib / 1024, 2),
                "measured, GiB": round(peak_mib / 1024, 2),
                "more, %": round(100 * (peak_mib / counted_mib - 1), 1),
                "expected, ms": ms["step"],
                "low to high, ms": f"{ms['low']} to {ms['high']}",
                "measured, ms": row["figures"]["ms"],
                "fastest step, ms": row["figures"]["from, to"][0],
            }
        )
    return found


def tested(page: str, rows: dict[str, Row], card: str) -> str:
    """Return the page on tested configurations with the GPU column of what has run, and the card."""
    for feature, names in ROWS.items():
        if not all(name in rows and isinstance(rows[name]["figures"], dict | list) for name in names):
            continue
        if not all(rows[name]["state"] in ("OK", "LIMIT") for name in names):
            continue
        page, count = re.subn(rf"^(\| {re.escape(feature)} \| [^|]*\| ?)[^|]*", r"\g<1>run ", page, flags=re.MULTILINE)
        if count != 1:
            raise ValueError(f"{TESTED.name}: {count} rows for {feature}")
    return CARD.sub(lambda _: card, page)


def main() -> None:
    outputs = [Path(name) for name in sys.argv[1:]]
    if not outputs or not all((output / "steps.jsonl").exists() for output in outputs):
        sys.exit(f"{__doc__}\nerror: pass folders that quarter.sh has written.")
    rows = collect(outputs)
    first = rows["first"]["figures"]
    name = re.sub(r" \d+GB.*", "", first["device"])
    machine = f"one {name}, driver {first['nvidia_driver']}, torch {first['torch']}"
    document = {
        "question": "Steps on one GPU",
        "command": "bash .gpu/quarter.sh .gpu OUTPUT 8.5",
        "machine": f"{machine}, {first['date']}",
    }
    steps = [
        {name: row[name] for name in ("step", "claim", "state")} | {"figures": short(row["figures"])}
        for row in rows.values()
    ]
    (RESULTS / "gpu-steps.json").write_text(with_rows(document, steps))
    device = next(name for name in DEVICES if name in first["device"].lower())
    compared = document | {"question": "Memory and time of a step, counted by --dry-run and measured"}
    (RESULTS / "gpu-dry-run.json").write_text(with_rows(compared, next_to_dry_run(rows, device)))
    predictions = RESULTS / "gpu-predictions.json"
    known = json.loads(predictions.read_text())
    if device.upper() in known["question"]:
        predictions.write_text(compare(known | {"machine": machine}, rows))
    shared = "`--stages`, `--reducer`, `--sync` and `--sync-bn` by two ranks that shared it over NCCL"
    card = f"GPU: {machine}, {first['date']}, one process;\n{shared}.\n"
    TESTED.write_text(tested(TESTED.read_text(), rows, card))


if __name__ == "__main__":
    main()
