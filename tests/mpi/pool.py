"""Ranks that live on: they run one program after the other, so that Python, torch and MPI start once for many tests.

A pool is one mpirun, or one plain Python, whose ranks are programs/pool_rank.py. It starts when it is first asked for.
It outlives only programs that end well on all their ranks: after any other it is killed, the test that asked fails
alone, and the next one gets a new pool. It ends with its pytest, also with one that is killed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

START_S = 60.0
GRACE_S = 5.0  # for the others' last words, after the first rank that failed
# Read when Python, MPI or torch starts, which a program in a pool does not do.
FIXED = ("PYTHON", "OMPI_", "MPIEXEC_", "OMP_")

Command = Callable[[str, int, list[str]], list[str]]


class ProgramFailed(AssertionError):  # noqa: N818 (it is the program's failure)
    """A program did not end well on all ranks; the message holds what each of them said."""


class Pools:
    """One pool for each launcher and number of ranks that was asked for; `folder` takes what the programs print.

    The environment is that of all programs: take it before any test changes the one of pytest.
    """

    def __init__(self, folder: Path, command: Command, environment: dict[str, str]) -> None:
        self._folder, self._command, self._environment = folder, command, environment
        self._pools: dict[tuple[str, int], _Pool] = {}
        self._programs = 0

    def run(
        self, launcher: str, ranks: int, words: list[str], *, cwd: Path, limit_s: float = 120, **env: str
    ) -> list[str]:
        """Run `words`, as they would stand behind `python`, in the folder `cwd`; what each rank has printed.

        Raises ProgramFailed where a rank raises, dies, leaves with another status than 0, or is over the limit.
        """
        assert not [name for name in env if name.startswith(FIXED)], f"needs a process of its own: {env}"
        self._programs += 1
        prints = self._folder / f"program-{self._programs}"
        prints.mkdir()
        request = {"words": words, "cwd": str(cwd), "environment": env, "prints": str(prints)}
        kind = (launcher, ranks)
        if kind not in self._pools:
            self._pools[kind] = _Pool(*kind, self._command, self._environment)
        try:
            self._pools[kind].run(request, limit_s)
        except BaseException:
            self._pools.pop(kind).kill()
            raise
        return [_print_of(rank, prints) for rank in range(ranks)]

    def pids(self, launcher: str, ranks: int) -> list[int]:
        """Of the ranks of a pool that lives."""
        return self._pools[launcher, ranks].pids

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


class _Pool:
    """The ranks of one launcher. To each leads a socket: a line of JSON asks for a program, another one is its end."""

    def __init__(self, launcher: str, ranks: int, command: Command, environment: dict[str, str]) -> None:
        self._temporary = tempfile.TemporaryDirectory(prefix="pool-")  # short, as a socket's path has to be
        self._folder = Path(self._temporary.name)
        program = [str(Path(__file__).parent / "programs" / "pool_rank.py"), str(self._folder / "socket")]
        words = command(launcher, ranks, program)
        # When pytest dies; mpirun then ends its ranks and tidies up behind them.
        death = "KILL" if launcher == "python" else "TERM"
        own = {
            "MPIEXEC_TIMEOUT": str(24 * 3600),
            "OMPI_MCA_mpi_yield_when_idle": "1",  # as hvdtrain sets it where ranks fill their cores
        }
        with socket.socket(socket.AF_UNIX) as server, (self._folder / "launcher.out").open("w") as out:
            server.bind(str(self._folder / "socket"))
            server.listen(ranks)
            server.settimeout(START_S)
            self._launcher = psutil.Popen(
                ["setpriv", "--pdeathsig", death, *words],
                cwd=self._folder,
                env={**environment, **own},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
            self._ranks: dict[int, socket.socket] = {}
            pids = {}
            try:
                for _ in range(ranks):
                    rank = server.accept()[0]
                    hello = json.loads(_heard(rank))
                    self._ranks[hello["rank"]], pids[hello["rank"]] = rank, hello["pid"]
            except BaseException as error:
                error.add_note((self._folder / "launcher.out").read_text())
                self.kill()
                raise
        self.pids = [pids[rank] for rank in range(ranks)]

    def run(self, request: dict[str, Any], limit_s: float) -> None:
        for connection in self._ranks.values():
            connection.sendall(json.dumps(request).encode() + b"\n")
        running = dict(self._ranks)
        failures: list[str] = []
        until = time.monotonic() + limit_s
        while running:
            ready = select.select(list(running.values()), [], [], max(0.0, until - time.monotonic()))[0]
            if not ready:
                break
            for rank in [rank for rank, connection in running.items() if connection in ready]:
                line = _heard(running.pop(rank))
                failure = json.loads(line)["failure"] if line else "died"
                if failure is not None:
                    failures.append(f"rank {rank}: {failure}")
                    until = min(until, time.monotonic() + GRACE_S)
        if running:
            self._ask_for_stacks(list(running))
            late = f"is not at its end after {limit_s} s" if not failures else "waits for the others"
            failures += [f"rank {rank}: {late}" for rank in running]
        if failures:
            prints = [_print_of(rank, Path(request["prints"])) for rank in self._ranks]
            said = [f"--- rank {rank} printed:\n{text}" for rank, text in enumerate(prints)]
            raise ProgramFailed("\n".join([" ".join(request["words"]), *failures, *said]))

    def _ask_for_stacks(self, ranks: list[int]) -> None:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGQUIT)
        time.sleep(1)  # a handler in C writes them; a rank that is stopped does not

    def close(self) -> None:
        """Let the ranks end by themselves."""
        self._hang_up()
        try:
            self._launcher.wait(START_S)
        except psutil.TimeoutExpired:
            self.kill()
        self._temporary.cleanup()

    def kill(self) -> None:
        """End all processes of it, whatever they are at; mpirun by itself, for it tidies up behind its ranks."""
        self._hang_up()
        below: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            below = self._launcher.children(recursive=True)
        for process in below:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        with contextlib.suppress(psutil.NoSuchProcess):
            self._launcher.terminate()
        _, left = psutil.wait_procs([self._launcher, *below], timeout=10)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        _, left = psutil.wait_procs(left, timeout=10)
        self._temporary.cleanup()
        assert not left, f"cannot be killed: {left}"

    def _hang_up(self) -> None:
        for connection in self._ranks.values():
            connection.close()


def _heard(connection: socket.socket) -> str:
    """The next line, empty where there is nobody any more."""
    try:
        with connection.makefile("r") as stream:
            return stream.readline()
    except ConnectionError:
        return ""


def _print_of(rank: int, prints: Path) -> str:
    file = prints / f"rank-{rank}"
    return file.read_text(errors="replace") if file.exists() else ""
