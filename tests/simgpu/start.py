"""Starts pytest in a process with a simulated GPU; by hand: python -m tests.simgpu.start [words of pytest]."""

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
TORCH = ("2.11.", "2.14.")  # whose symbols the shim names
INSIDE = "TESTS_INSIDE_SIMGPU"  # is set in that process


def what_is_missing() -> str | None:
    """Why there is no simulated GPU on this machine, if there is none."""
    if (sys.platform, platform.machine()) != ("linux", "x86_64"):
        return f"a simulated GPU needs Linux on x86-64, this is {sys.platform} on {platform.machine()}"
    if not version("torch").startswith(TORCH):
        return f"a simulated GPU needs torch {'* or '.join(TORCH)}*, this is {version('torch')}"
    torch = importlib.util.find_spec("torch")
    assert torch is not None
    if not any((Path(folder) / "lib/libtorch_cuda.so").exists() for folder in torch.submodule_search_locations or ()):
        return "a simulated GPU needs a torch that was built for CUDA"
    return None if shutil.which("gcc") else "a simulated GPU needs gcc, for its shim"


def start_pytest(folder: Path, words: list[str]) -> subprocess.CompletedProcess[str]:
    """Run pytest on tests/simgpu/inside with these words; the shim is built in the folder."""
    shim = folder / "shim.so"
    subprocess.run(["gcc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "simulator/shim.c"], check=True)
    without = ("xdist", "cacheprovider", "faulthandler")  # a run has its own of the last one
    plugins = [word for name in without for word in ("-p", f"no:{name}")]
    command = [sys.executable, "-m", "pytest", *plugins, *words]
    environment = {
        **os.environ,
        INSIDE: "1",
        "LD_PRELOAD": str(shim),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder),
    }
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(command, cwd=HERE.parents[1], env=environment, check=False, **output)


if __name__ == "__main__":
    if missing := what_is_missing():
        sys.exit(missing)
    with tempfile.TemporaryDirectory(prefix="simgpu-") as shims:
        done = start_pytest(Path(shims), sys.argv[1:] or ["tests/simgpu/inside"])
    print(done.stdout, end="")
    sys.exit(done.returncode)
