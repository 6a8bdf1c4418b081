"""Prove that mpi4py and Horovod use the same MPI, the one whose mpirun is on PATH.

Each library runs in a separate job on 2 ranks, sums over them, and reports which libmpi it loaded. If a sum is wrong or
the libraries differ, the script names both paths and exits with status 1.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path


def libmpi_of_this_process() -> str:
    """Return the path of the libmpi that is mapped into this process."""
    mapped = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "/libmpi.so" in line
    }
    return ", ".join(sorted(os.path.realpath(path) for path in mapped))


def sum_through(binding: str) -> tuple[int, int]:
    """Return the sum of rank + 1 over all ranks, and this rank."""
    if binding == "mpi4py":
        from mpi4py import MPI

        return MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1), MPI.COMM_WORLD.rank
    import horovod.torch as hvd
    import torch

    hvd.init()
    total = hvd.allreduce(torch.tensor(float(hvd.rank() + 1)), op=hvd.Sum)
    return int(total.item()), hvd.rank()


def libmpi_under_mpirun(binding: str, folder: Path) -> str:
    """Start 2 ranks of this file, and return the libmpi they loaded. Raises SystemExit with the error."""
    as_root = ["--allow-run-as-root"] if os.geteuid() == 0 and is_open_mpi() else []
    oversubscribe = ["--oversubscribe"] if is_open_mpi() else []
    argv = ["mpirun", *as_root, *oversubscribe, "-np", "2", sys.executable, __file__, binding, str(folder)]
    done = subprocess.run(
        argv, env={**os.environ, "MPIEXEC_TIMEOUT": "120"}, capture_output=True, text=True, check=False
    )
    answers = [json.loads(path.read_text()) for path in sorted(folder.glob(f"{binding}-*.json"))]
    if done.returncode != 0 or [answer["sum"] for answer in answers] != [3, 3]:
        libraries = sorted({answer["libmpi"] for answer in answers})
        sys.exit(
            f"setup: {binding} does not work under {shutil.which('mpirun')} (it loaded {libraries or 'no libmpi'}): "
            f"exit status {done.returncode}\n{done.stdout[-2000:]}{done.stderr[-4000:]}"
        )
    return str(answers[0]["libmpi"])


def is_open_mpi() -> bool:
    """Return whether mpirun on PATH is Open MPI's."""
    return "Open MPI" in subprocess.run(["mpirun", "--version"], capture_output=True, text=True, check=True).stdout


def main() -> None:
    """Without arguments compare the bindings; with a binding and a folder run as one rank."""
    if len(sys.argv) == 3:
        binding, folder = sys.argv[1], Path(sys.argv[2])
        total, rank = sum_through(binding)
        answer = {"sum": total, "libmpi": libmpi_of_this_process()}
        (folder / f"{binding}-{rank}.json").write_text(json.dumps(answer))
        return
    with tempfile.TemporaryDirectory() as name:
        loaded = {binding: libmpi_under_mpirun(binding, Path(name)) for binding in ("mpi4py", "horovod")}
    if len(set(loaded.values())) != 1:
        sys.exit(f"setup: mpi4py loads {loaded['mpi4py']}, but Horovod loads {loaded['horovod']}: they must be one MPI")
    print(f"setup: mpi4py and Horovod both use {loaded['mpi4py']}", file=sys.stderr)


if __name__ == "__main__":
    main()
