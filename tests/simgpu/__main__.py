"""python -m tests.simgpu [words of pytest]: what test_simgpu.py starts, by hand."""

import sys
import tempfile
from pathlib import Path

from tests.simgpu.start import start_pytest, what_is_missing

if missing := what_is_missing():
    sys.exit(missing)
with tempfile.TemporaryDirectory(prefix="simgpu-") as folder:
    done = start_pytest(Path(folder), sys.argv[1:] or ["tests/simgpu/inside"])
print(done.stdout, end="")
sys.exit(done.returncode)
