"""Runs steps in a limited time and keeps every result: a step's limit, its leftovers, its row on disk.

In the output folder: steps.jsonl, a line as each step ends; report.md; logs.txt; facts.txt; runs.tar.gz, the run
folders without weights.
"""

import json
import os
import shlex
import signal
import subprocess
import tarfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

MARK = "HVDTRAIN_QUARTER_STEP"  # in the environment of every process of a step
TOO_LITTLE_S = 8.0  # a step is not started with less time left
GRACE_S = 4.0  # between SIGTERM and SIGKILL
RESERVE_S = 6.0  # to write the report
PATIENCE_ON_CPUS = 4  # times a step's limit
LOG_CHARACTERS = 60_000  # kept of a step's log, at each end
KEPT = {".json", ".jsonl", ".err", ".log", ".md", ".xml", ".txt", ".svg"}
State = Literal["OK", "WRONG", "FAILED", "LIMIT", "NO TIME", "NO GPU"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """A claim about GPUs, and the command whose files show whether it holds."""

    name: str
    claim: str
    limit_s: float
    command: Sequence[str]
    env: Mapping[str, str] = field(default_factory=dict)
    status: int | None = 0  # the exit status that it must have; None for any
    check: Callable[[Path, str], Any] | None = None  # from its folder and output to figures; AssertionError if wrong
    needs_gpu: str = ""  # why it cannot run on CPUs


Lane = Sequence[Step]  # one after the other


class Quarter:
    """The time, the output folder, and the steps that have ended."""

    def __init__(
        self, *, work: Path, output: Path, minutes: float, on_cpus: bool = False, only: Sequence[str] = ()
    ) -> None:
        """Start the clock; `only` are beginnings of the names of steps to run."""
        self.began = time.monotonic()
        self._end = self.began + 60 * minutes - RESERVE_S
        self.work, self.output, self._on_cpus, self._only = work / "steps", output, on_cpus, tuple(only)
        self.rows: list[dict[str, Any]] = []
        self._lock = threading.Lock()
        self._running: set[str] = set()
        for folder in (self.work, self.output):
            folder.mkdir(parents=True, exist_ok=True)

    def run(self, lanes: Sequence[Lane]) -> None:
        """Run lanes side by side, on CPUs one after the other, and then keep their run folders."""
        with ThreadPoolExecutor(1 if self._on_cpus else len(lanes)) as pool:
            list(pool.map(self._run_lane, lanes))
        self._keep_runs()

    def stop(self) -> None:
        """Kill all that runs, and write the report."""
        for name in list(self._running):
            kill_marked(self._mark(name))
        self._report()

    def _run_lane(self, lane: Lane) -> None:
        for step in lane:
            if not self._only or step.name.startswith(self._only):
                self.run_step(step)

    def _mark(self, name: str) -> str:
        return f"{os.getpid()}:{name}"

    def run_step(self, step: Step) -> None:
        """Run a step within its limit and the time left, end whatever it leaves behind, and write its row."""
        limit_s = min(step.limit_s * (PATIENCE_ON_CPUS if self._on_cpus else 1), self._end - time.monotonic())
        if step.needs_gpu and self._on_cpus:
            return self._add(step, "NO GPU", step.needs_gpu)
        if limit_s < TOO_LITTLE_S:
            return self._add(step, "NO TIME", "")
        folder = self.work / step.name
        folder.mkdir(exist_ok=True)
        started = time.monotonic()
        self._running.add(step.name)
        status = run_marked(step, folder, mark=self._mark(step.name), limit_s=limit_s)
        self._running.discard(step.name)
        output = (folder / "log").read_text(errors="replace")
        state, figures = judge(step, folder, output, status, limit_s)
        return self._add(step, state, figures, seconds=time.monotonic() - started, output=output)

    def _add(self, step: Step, state: State, figures: Any, *, seconds: float = 0.0, output: str = "") -> None:
        at_s = time.monotonic() - self.began
        row = {"step": step.name, "state": state, "at_s": round(at_s, 1), "s": round(seconds, 1), "claim": step.claim}
        row["figures"] = figures
        if len(output) > 2 * LOG_CHARACTERS:
            output = f"{output[:LOG_CHARACTERS]}\n[...]\n{output[-LOG_CHARACTERS:]}"
        with self._lock:
            self.rows.append(row)
            append(self.output / "steps.jsonl", json.dumps(row) + "\n")
            append(self.output / "logs.txt", f"\n##### {step.name}: {state}, {seconds:.1f} s\n{output}\n")
            self._report()
        print(f"{at_s:6.1f} {state:8}{step.name:20}{seconds:6.1f} s  {in_words(figures)[:240]}", flush=True)

    def _report(self) -> None:
        lines = ["| at, s | step | state | s | claim | figures |", "|--:|---|---|--:|---|---|"]
        for row in self.rows:
            figures = in_words(row["figures"])[:1500]
            lines.append(
                f"| {row['at_s']} | {row['step']} | {row['state']} | {row['s']} | {row['claim']} | {figures} |"
            )
        (self.output / "report.md").write_text("\n".join(lines) + "\n")

    def _keep_runs(self) -> None:
        part = self.output / "runs.part"
        with suppress(OSError), tarfile.open(part, "w:gz") as archive:
            for path in sorted([*self.work.glob("*/runs/**/*"), *self.work.glob("*/build/bench/*")]):
                inside = path.relative_to(self.work)
                if path.suffix in KEPT and "checkpoints" not in inside.parts and path.is_file():
                    archive.add(path, str(inside))
        part.replace(self.output / "runs.tar.gz")


def run_marked(step: Step, folder: Path, *, mark: str, limit_s: float) -> int | None:
    """Run the step's command with its output in folder/log; return its exit status, or None after the limit."""
    with (folder / "log").open("w") as log:
        print(f"$ {shlex.join(step.command)}", file=log, flush=True)
        env = {**os.environ, **step.env, MARK: mark}
        how: dict[str, Any] = {"cwd": folder, "env": env, "stdout": log, "stderr": log, "stdin": subprocess.DEVNULL}
        try:
            process = subprocess.Popen(step.command, start_new_session=True, **how)
        except OSError as error:
            print(error, file=log)
            return 127
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
            return None
        finally:
            kill_marked(mark)
            process.wait()


def kill_marked(mark: str) -> None:
    """Kill all processes with this mark, until no more come: ranks of mpirun are in groups of their own."""
    wanted, end = f"{MARK}={mark}".encode(), time.monotonic() + GRACE_S
    while (pids := [pid for pid in processes() if wanted in environment_of(pid)]) and time.monotonic() < end:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def processes() -> list[int]:
    """Return the numbers of all processes."""
    return [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]


def environment_of(pid: int) -> list[bytes]:
    """Return the environment with which a process was started; empty for one that has ended or is another user's."""
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def judge(step: Step, folder: Path, output: str, status: int | None, limit_s: float) -> tuple[State, Any]:
    """Return whether the step's claim holds, and its figures or the reason."""
    if status is None:
        return "LIMIT", f"not done after {limit_s:.0f} s; {last_words(output)}"
    if step.status not in (None, status):
        return "FAILED", f"exit status {status}; {last_words(output)}"
    if step.check is None:
        return "OK", ""
    try:
        return "OK", step.check(folder, output)
    except Exception as error:  # noqa: BLE001 (a file that is missing is a wrong claim, too)
        return "WRONG", f"{type(error).__name__}: {error}"


def append(path: Path, text: str) -> None:
    """Append text and wait until it is on disk: the machine may go at any time."""
    with path.open("a") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def last_words(output: str) -> str:
    """Return the last lines of an output."""
    lines = [line for line in output.splitlines() if line.strip() and not line.startswith("$ ")]
    return " / ".join(lines[-3:])[-400:]


def in_words(figures: Any) -> str:
    """Return figures in one line that may stand in a cell of a table."""
    text = figures if isinstance(figures, str) else json.dumps(figures)
    return text.replace("|", "\\|").replace("\n", " ")
