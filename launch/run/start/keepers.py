"""The keepers of a run's hosts, processes that have imported what its ranks import: the next start is a fork of them.

A run reports what to import. Only runs on CPUs have keepers; without one on its host a rank starts by itself.
"""

import contextlib
import os
import re
from pathlib import Path, PurePath
from types import TracebackType

from launch.errors import ProcessError
from launch.files import read_text
from launch.placement.slots import hosts_of
from launch.process import BackgroundProcess
from launch.run.start.render import PreparedRun
from launch.run.start.request import Attempt

PROGRAM = Path(__file__).parents[1] / "rank" / "keeper.py"


class Keepers:
    """The keepers of consecutive starts, which end with the block.

    They import while the ranks train, or `after_run`, where the speed of the ranks is measured.
    """

    def __init__(self, *, after_run: bool = False) -> None:
        self._after_run = after_run
        self.attempt = Attempt(keeper=f"hvdlaunch-{os.urandom(16).hex()}")
        self._running: dict[str, BackgroundProcess] = {}
        self._waiting: list[BackgroundProcess] = []  # for the end of the run
        self._seen: Path | None = None  # the last report with imports

    def __enter__(self) -> "Keepers":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for keeper in self._running.values():
            keeper.end()

    def follow(self, prepared: PreparedRun, report: Path) -> None:
        """Start the keepers that are missing, once for each start of the run, when its ranks report their imports."""
        imports, plan = report.with_name("imports"), prepared.plan
        if report == self._seen or plan.slots[0].gpu is not None or not imports.exists():
            return
        self._seen = report
        python = plan.executable or ""
        if not re.fullmatch(r"python[\d.]*", PurePath(python).name):
            return
        with contextlib.suppress(OSError, ValueError, ProcessError):
            modules = read_text(imports)
            for host in hosts_of(plan.slots):
                keeper = self._running.get(host.name)
                if keeper is None or keeper.status() is not None:
                    words = [python, str(PROGRAM), str(report), self.attempt.keeper]
                    if host.name not in plan.local:
                        words = prepared.launcher.ssh.command(host.name, words, str(Path.cwd()))
                    self._running[host.name] = keeper = BackgroundProcess(words, text=modules)
                    self._waiting.append(keeper)
        if not self._after_run:
            self.let_import()

    def let_import(self) -> None:
        """Let the keepers import that have been started since the last call."""
        while self._waiting:
            self._waiting.pop().write("\n")
