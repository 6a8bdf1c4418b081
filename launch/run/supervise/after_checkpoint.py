"""Runs the command of --after-checkpoint on rank 0's host during training, one at a time, for the newest checkpoint."""

import math
import time
from collections.abc import Callable
from pathlib import Path

from launch.errors import ProcessError
from launch.process import BackgroundProcess
from launch.run.start.render import PreparedRun
from launch.run.supervise.rank_logs import RankReport, read_report
from launch.run.supervise.screen import Screen

FOLDER_VARIABLE = "HVDLAUNCH_CHECKPOINT"  # the checkpoint's folder, in the command's environment
POLL_S = 1.0
LAST_S = 600.0  # for the last command, after the ranks have ended


class AfterCheckpoint:
    """The commands of one run; without --after-checkpoint there are none."""

    def __init__(self, prepared: PreparedRun, report: Path, screen: Screen) -> None:
        self._prepared, self._report, self._screen = prepared, report, screen
        self._command = prepared.plan.request.after_checkpoint
        self._host = prepared.plan.slots[0].host
        self._is_here = self._host in prepared.plan.local
        self._running: BackgroundProcess | None = None
        self._step: int | None = None  # of the newest checkpoint that a command was started for
        self._folder = ""
        self._polled_at = -math.inf

    def poll(self) -> None:
        """Start the command if there is a new checkpoint and no other command runs; does not wait."""
        if self._command is not None and time.monotonic() >= self._polled_at + POLL_S:
            self._polled_at = time.monotonic()
            self._follow(read_report(self._report))

    def finish(self, is_over: Callable[[], bool]) -> None:
        """Give the last checkpoint's command its time, which also ends when `is_over`."""
        until, report = time.monotonic() + LAST_S, read_report(self._report)
        while self._command is not None and self._follow(report):
            if time.monotonic() > until or is_over():
                where = "" if self._is_here else f", but it may still run on host {self._host}"
                self._warn(f"stopped at {self._folder}{where}. Run it again for this folder.")
                break
            time.sleep(0.1)

    def end(self) -> None:
        """End a command that still runs."""
        if self._running is not None:
            self._running.end()

    def _warn(self, text: str) -> None:
        self._screen.say(f"warning: --after-checkpoint: {text}")

    def _follow(self, report: RankReport) -> bool:
        """Report the end of a command, and start the next one; return whether one runs."""
        if self._running is not None:
            if (status := self._running.status()) is None:
                return True
            self._running = None
            if status:
                self._warn(f"status {status} for {self._folder}; the training continues.")
        if report.run_folder is None or report.checkpoint in (None, self._step):
            return False
        self._step = report.checkpoint
        self._folder = f"{Path.cwd() / report.run_folder}/checkpoints/step-{self._step:09d}"
        words = ["env", f"{FOLDER_VARIABLE}={self._folder}", "sh", "-c", self._command or ""]
        if not self._is_here:
            words = self._prepared.launcher.ssh.command(self._host, words, str(Path.cwd()))
        try:
            self._running = BackgroundProcess(words)
        except ProcessError as error:
            self._warn(f"{error}; the training continues.")
        return self._running is not None
