"""The terminal recording of the quick start: a real run, line by line, as it was printed.

    python -m scripts.docs.pictures.recording     runs it once more, and keeps lines and times

Pauses are cut to PAUSE_S.
"""

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from scripts.docs.pictures.canvas import Canvas

PROJECT = Path(__file__).resolve().parents[3]
KEPT = PROJECT / "docs" / "pictures" / "quick_start.json"
LAUNCH = "HVDTRAIN_FAULT=kill@rank1:step60 hvdlaunch run -np 2 --restarts 3 -- \\\n"
DATA = "    python -m hvdtrain.effnet --data digits --model efficientnet_tiny \\\n"
COMMAND = f"{LAUNCH}{DATA}    --batch-size-per-rank 32 --epochs 5 --checkpoint-every 20steps"
PAUSE_S = 0.5
COLUMNS, LINE, SIZE = 102, 19.0, 12.0


def record() -> list[tuple[float, str]]:
    """Run the command; return the seconds since the start and the text of each printed line."""
    with tempfile.TemporaryDirectory() as folder:
        begin = time.monotonic()
        with subprocess.Popen(
            ["bash", "-c", COMMAND], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        ) as process:
            lines = [(round(time.monotonic() - begin, 1), line.rstrip()) for line in process.stdout or ()]
    if process.returncode:
        sys.exit(f"recording: status {process.returncode}: {lines}")
    return lines


def draw() -> str:
    """Draw lines that appear at the recorded times; readers who prefer no motion see all of them at once."""
    printed: list[tuple[float, str]] = json.loads(KEPT.read_text())
    rows: list[tuple[float, str, bool]] = [(0.0, line, True) for line in f"$ {COMMAND}".split("\n")]
    at, before = 0.6, 0.0
    for seconds, text in printed:
        at += min(seconds - before, PAUSE_S)
        before = seconds
        rows += [(at, part, False) for part in _wrapped(text)]
    height = 44 + LINE * len(rows) + 12
    canvas = Canvas(800, height, "A terminal: a run loses a rank, restarts and finishes")
    canvas.add(_motion())
    for x in (22, 40, 58):
        canvas.circle(x, 20, 5, kind="plain")
    about = f"2 CPU cores that other programs used too; {printed[-1][0]:.0f} s, pauses cut"
    canvas.text(778, 20, about, anchor="end", ink="soft", size=11.5)
    for number, (seconds, text, is_command) in enumerate(rows):
        y = 44 + LINE * number + LINE / 2
        canvas.add(f'<g class="shown" style="animation-delay:{seconds:.1f}s">')
        ink = "ink" if is_command else _ink(text)
        canvas.text(18, y, text, size=SIZE, ink=ink, anchor="start", bold=is_command, code=True)
        canvas.add("</g>")
    return canvas.svg()


def _motion() -> str:
    still = "@media (prefers-reduced-motion: reduce){.shown{animation:none;opacity:1}}"
    return (
        f"<style>@keyframes show{{to{{opacity:1}}}} .shown{{opacity:0;animation:show 0.01s forwards}} {still}</style>"
    )


def _ink(text: str) -> str:
    if "error:" in text:
        return "red"
    if "warning:" in text or text.startswith("resumed"):
        return "orange"
    return "green" if text.startswith("finished") else "ink"


def _wrapped(text: str) -> list[str]:
    """Split a line into pieces that fit."""
    return re.findall(rf"\S.{{0,{COLUMNS - 1}}}(?=\s|$)", text) or [text]


if __name__ == "__main__":
    KEPT.write_text(json.dumps(record(), indent=0) + "\n")
    sys.exit(0)
