"""Real launchers, each ended by MPIEXEC_TIMEOUT at the latest; their ranks are forks (start/forkserver.py)."""

import contextlib
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from tests.mpi import forks

PROJECT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 120
EFFNET, BERT = ([str(PROGRAMS / "every_option.py"), program] for program in ("effnet", "bert"))
EVERY_OPTION = "from hvdtrain.settings import command_line; command_line.auto_fields = lambda _: {}\n"
QUICK = ["--data", "digits", "--model", "efficientnet_tiny", "--batch-size-per-rank", "64", "--epochs", "1"]

Run = Callable[..., subprocess.CompletedProcess[str]]


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.mpi)


def slow(*values: Any) -> Any:
    """Parameters that are left to make test-slow."""
    return pytest.param(*values, marks=pytest.mark.slow)


def long(*values: Any) -> Any:
    """Parameters that are left to make test-long."""
    return pytest.param(*values, marks=(pytest.mark.slow, pytest.mark.long))


def launcher_of(ranks: int) -> str:
    """Of a test for any number of ranks: one rank has none."""
    return "mpirun" if ranks > 1 else "python"


def command(launcher: str, ranks: int, words: list[str]) -> list[str]:
    python = [sys.executable, *words]
    if launcher == "mpirun":
        return ["mpirun", "--oversubscribe", "-np", str(ranks), *python]
    if launcher == "horovodrun":
        return ["horovodrun", "-np", str(ranks), *python]
    if launcher == "hvdlaunch":
        run = ["-m", "launch", "run", "-np", str(ranks), "--gpus", "none", "--"]
        return [sys.executable, *run, *python]
    if launcher == "gloo":
        return ["horovodrun", "--gloo", "-np", str(ranks), *python]
    assert launcher == "python"
    return python


def environment(folder: Path) -> dict[str, str]:
    return {
        **os.environ,
        "MPIEXEC_TIMEOUT": str(TIMEOUT_S),
        "OMPI_ALLOW_RUN_AS_ROOT": "1",
        "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_btl": "self,vader",  # nothing leaves the machine
        "HOME": str(folder),  # horovodrun keeps its caches there
        "OMPI_MCA_mpi_yield_when_idle": "1",  # as hvdtrain sets it where ranks fill their cores
        **forks.environment(),
    }


def start_in(folder: Path, launcher: str, ranks: int, words: list[str], **env: str) -> subprocess.CompletedProcess[str]:
    """Start `words` with Python under a launcher, and wait for the end."""
    return subprocess.run(
        command(launcher, ranks, words),
        cwd=folder,
        env={**environment(folder), **env},
        capture_output=True,
        text=True,
        timeout=float(env.get("MPIEXEC_TIMEOUT", TIMEOUT_S)) + 30,
        check=False,
    )


def end_well(folder: Path, launcher: str, ranks: int, words: list[str], **env: str) -> str:
    """The same where it has to end with 0; what was said."""
    done = start_in(folder, launcher, ranks, words, **env)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@contextlib.contextmanager
def running_in(
    folder: Path, argv: list[str], env: dict[str, str], *, errors: str = "out"
) -> Iterator[subprocess.Popen[str]]:
    """Start it in a process group of its own, as a terminal would; at the end nothing in its folder lives.

    What it prints is in the file `out` of the folder, that on standard error in `errors`.
    """
    for name in ("out", errors):
        (folder / name).write_text("")
    with (folder / "out").open("a") as out, (folder / errors).open("a") as err:
        process = subprocess.Popen(
            argv,
            cwd=folder,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        for left in left_in(folder):
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()


def program_of(folder: Path, text: str) -> str:
    """The file of a program with this text; where it lies its ranks are forks."""
    file = folder / "programs" / "planted.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(text)
    return str(file)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Start `words` with Python under a launcher, in tmp_path, and wait for the end."""
    return partial(start_in, tmp_path)


@pytest.fixture
def run_program(tmp_path: Path) -> Callable[..., list[dict]]:
    """Run a file of programs/; it writes rank-<r>.json into the folder it is given. Their contents, by rank."""

    def start(launcher: str, ranks: int, program: str, *args: str, **env: str) -> list[dict]:
        folder = tmp_path / f"{Path(program).stem}-{launcher}-{ranks}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        end_well(tmp_path, launcher, ranks, [str(PROGRAMS / program), str(folder), *args], **env)
        answers = [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(ranks)]
        assert len(list(folder.glob("rank-*.json"))) == ranks
        return answers

    return start


@pytest.fixture
def runs(tmp_path: Path) -> Callable[..., Any]:
    """A run in tmp_path that may be interrupted: of so many ranks, with these words."""
    from tests.mpi.interrupted import SHORT, Runs

    return lambda ranks, words=SHORT: Runs(folder=tmp_path, ranks=ranks, words=words)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """The same without interruption, made once for each number of ranks and words."""
    from tests.mpi.interrupted import SHORT, Runs

    known: dict[Any, Runs] = {}

    def make(ranks: int, words: tuple[str, ...] = SHORT) -> Runs:
        if (ranks, words) not in known:
            one = Runs(folder=tmp_path_factory.mktemp("reference"), ranks=ranks, words=words)
            one.finish()
            known[ranks, words] = one
        return known[ranks, words]

    return make


def rank_pids(run_folder: Path) -> list[int]:
    """The pids that the ranks of a run wrote down, by rank."""
    files = sorted(run_folder.glob("ranks/rank-*.json"))
    return [json.loads(file.read_text())["pid"] for file in files]


def wait_until(condition: Callable[[], Any], seconds: float, said: Path | None = None) -> Any:
    """The first true value of `condition`; an assertion error after `seconds`, with what a file says by then."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        value = condition()
        if value:
            return value
        time.sleep(0.05)
    raise AssertionError(f"not within {seconds} s: {condition}{said.read_text() if said else ''}")


def left_in(folder: Path) -> list[psutil.Process]:
    """Living processes that work in this folder: ranks, launchers and loader workers."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(OSError, psutil.Error):  # a zombie works nowhere
            if Path(f"/proc/{pid}/cwd").readlink() == folder:
                found.append(psutil.Process(pid))
    return found


def folder_of_images(folder: Path, count: int, parts: tuple[str, ...] = (".",)) -> None:
    """Noise of two classes, so many images of each in each part."""
    noise = np.random.default_rng(0)
    for part, label in itertools.product(parts, "ab"):
        (folder / part / label).mkdir(parents=True)
        for number in range(count):
            image = Image.fromarray(noise.integers(0, 256, (32, 32, 3), dtype=np.uint8))
            image.save(folder / part / label / f"{number}.png")
