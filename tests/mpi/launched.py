"""hvdlaunch as a user starts it, in a folder of its own, with stand-ins first on its PATH."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.mpi import forks
from tests.mpi.conftest import PROGRAMS, TIMEOUT_S, left_in, running_in, wait_until

PLACE = [sys.executable, str(PROGRAMS / "place.py"), "."]
ON_CPUS = "hvdlaunch: note: --gpus none, running on CPU"
NO_NVML = "hvdlaunch: note: localhost: NVML is not available, GPU facts come from nvidia-smi: "


def argv(*words: str, program: list[str] | None = None) -> list[str]:
    """hvdlaunch with these words; with a program as `run -np 2 --gpus none` unless they say otherwise.

    --allow-run-as-root: no note about root, wherever the tests run.
    """
    start = [sys.executable, "-m", "launch"]
    if program is None:
        return [*start, *words]
    asked = [*(() if "-np" in words else ("-np", "2")), *(() if "--gpus" in words else ("--gpus", "none"))]
    return [*start, "run", *asked, "--allow-run-as-root", *words, "--", *program]


def environment(folder: Path, **more: str) -> dict[str, str]:
    """The tests' own, without Open MPI's and Slurm's settings, with folder/bin first on PATH; ranks are forks."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "SLURM_"))}
    kept.pop("CUDA_VISIBLE_DEVICES", None)
    kept["PATH"] = f"{folder / 'bin'}:{Path(sys.executable).parent}:{kept['PATH']}"
    return {**kept, "MPIEXEC_TIMEOUT": str(TIMEOUT_S), "HOME": str(folder), **forks.environment(), **more}


def finished(folder: Path, words: list[str], **more: str) -> subprocess.CompletedProcess[str]:
    """Start it and wait for the end; nothing of it is left."""
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment(folder, **more),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S + 30,
        check=False,
    )
    wait_until(lambda: not left_in(folder), 5)
    return done


def started(folder: Path, words: list[str], **more: str) -> contextlib.AbstractContextManager[subprocess.Popen[str]]:
    """Start it as a terminal would; at the end nothing in its folder lives."""
    return running_in(folder, words, environment(folder, **more))


def ranks(folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """What the ranks of place.py have written; fewer than `count` if they have not all."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))[: count + 1]]


def running(folder: Path, count: int = 2) -> list[dict[str, Any]]:
    """The ranks of place.py once all of them are ready."""
    return list(wait_until(lambda: len(found := ranks(folder, count)) == count and found, TIMEOUT_S))


def signals(folder: Path) -> list[list[str]]:
    """The signals that each rank of place.py has noted, each once."""
    return [list(dict.fromkeys(file.read_text().split())) for file in sorted(folder.glob("rank-*.signals"))]


def lines(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What a user reads of a run, without the remarks that it is one on CPUs, or has a stand-in for nvidia-smi."""
    return [line for line in (done.stdout + done.stderr).splitlines() if not line.startswith((ON_CPUS, NO_NVML))]


def stand_in(folder: Path, name: str, script: str) -> Path:
    """A program of this name first on PATH, in Python."""
    file = folder / "bin" / name
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"#!{sys.executable}\n{script}")
    file.chmod(0o755)
    return file


def recorder(folder: Path, name: str, *, version: str = "mpirun (Open MPI) 4.1.8") -> Path:
    """A stand-in that answers --version and writes how it was started into NAME.json."""
    record = folder / f"{name}.json"
    stand_in(
        folder,
        name,
        "import json, os, sys\n"
        f"if sys.argv[1:] == ['--version']:\n    sys.exit(print({version!r}))\n"
        f"with open({str(record)!r}, 'w') as file:\n"
        "    json.dump({'argv': sys.argv, 'environment': dict(os.environ)}, file)\n",
    )
    return record


def planned(folder: Path, words: list[str], **more: str) -> tuple[dict[str, str], list[str], str]:
    """The variables and the words of the command with which the plan of a run ends, and both as one text."""
    at = words.index("run")
    done = finished(folder, [*words[:at], "plan", *words[at + 1 :]], **more)
    assert done.returncode == 0, done.stderr
    found = shlex.split(line := done.stdout.partition("\n# command\n")[2])
    count = next(i for i, word in enumerate(found) if "=" not in word)
    return dict(word.split("=", 1) for word in found[:count]), found[count:], line
