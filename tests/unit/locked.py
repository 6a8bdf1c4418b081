"""Other processes that hold locks on GPUs, as the first rank of a run does."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

LOCK = """\
import fcntl, sys
files = [open(name, "w") for name in sys.argv[1:]]
for file in files:
    fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
HOLD = """\
import os, sys
from launch.run.rank import bind
bind.LOCKS, program, *uuids = sys.argv[1:]
bind.hold_gpus([{"host": "h1", "gpu": 0, "gpu_uuid": uuid} for uuid in uuids])
os.execvp("sh", ["sh", "-c", program])
"""


@contextlib.contextmanager
def locked(*files: Path) -> Iterator[int]:
    """A process that has locked these files; its pid."""
    with _running(LOCK, *map(str, files)) as (pid, _):
        yield pid


@contextlib.contextmanager
def held_by_bind(folder: Path, *uuids: str, program: str) -> Iterator[tuple[int, str]]:
    """A rank that has locked these GPUs and become a shell's program; its pid, and the line that this has printed."""
    with _running(HOLD, str(folder), f"{program}; read end", *uuids) as found:
        yield found


@contextlib.contextmanager
def _running(script: str, *words: str) -> Iterator[tuple[int, str]]:
    """Python with a script that prints a line, and ends when its standard input does."""
    argv = [sys.executable, "-c", script, *words]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line
        try:
            yield process.pid, line
        finally:
            process.stdin.close()
