"""One run, from its plan to its exit status: signals, the first failure, and nothing left running."""

import contextlib
import json
import os
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from launch.errors import ProcessError
from launch.placement import RankSlot
from launch.prepare import Ready
from launch.probe import SSH_OPTIONS, is_local
from launch.process import Launcher, ask

# After it was told to stop, mpirun needs about a second; where a host is silent it may wait for ever.
STOP_S = 5.0
ANSWER_S = 4.0
TAIL_LINES = 12
# An error that only tells that another rank is gone.
SECONDARY = re.compile(r"HorovodInternalError|Horovod has been shut down|MPI_ERR|[Bb]roken pipe|Connection reset")
LAST_WORDS = "; its last words:"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a run ended."""

    status: int
    run_folder: str | None  # as rank 0 reported it
    why: str | None  # it failed, in one line
    stopped: bool  # by a signal that hvdlaunch got


def run(ready: Ready) -> Ended:
    """Start it, wait, and clean up; one line on standard error tells why it failed."""
    # Rank 0 may be on another host: then the folder must be one that both have, as the run folder's.
    parent = None if ready.order.network is None else Path.cwd()
    try:
        folder = tempfile.mkdtemp(prefix=".hvdlaunch-", dir=parent)
    except OSError as error:
        raise ProcessError(f"no folder can be made in {parent or tempfile.gettempdir()}: {error.strerror}") from error
    return _run(ready, Path(folder))


def _run(ready: Ready, folder: Path) -> Ended:
    report = folder / "report.json"
    launcher = Launcher(ready.argv, env={**ready.environment, "HVDLAUNCH_REPORT": str(report)}, folder=folder)
    slots = ready.order.slots
    story = Story({slot.host for slot in slots})
    reader = threading.Thread(target=_copy, args=(launcher, story), daemon=True)
    reader.start()
    stopped = _Stops(launcher)
    try:
        while (status := launcher.wait(0.1)) is None and not stopped.overdue():
            pass
        told = read_report(report)
    finally:
        stopped.restore()
        launcher.end()
    reader.join(1.0)
    run_folder = told.get("run_folder")
    if stopped.by:
        by = signal.Signals(stopped.by[0])
        return Ended(status=128 + by, run_folder=run_folder, why=f"stopped by {by.name}", stopped=True)
    if status is None or (status == 0 and story.lost):
        status = 1  # Open MPI 5.0.11 ends with 0 when it has lost a host
    line = explain(status, story, slots, told) if status else None
    if line is not None:
        print(f"hvdlaunch: {line}", file=sys.stderr, flush=True)
    why = in_one_line(line or told.get("said", "")) if status else None
    return Ended(status=status, run_folder=run_folder, why=why, stopped=False)


class _Stops:
    """Signals, passed on to the ranks; the second one that asks for an end ends everything now."""

    def __init__(self, launcher: Launcher) -> None:
        self.by: list[int] = []
        self._launcher = launcher
        self._at = 0.0
        self._before = {
            number: signal.signal(number, self._on)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
        }

    def _on(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:
            self.by.append(number)
            self._at = time.monotonic()
        self._launcher.signal(number if number == signal.SIGUSR1 else signal.SIGTERM)

    def overdue(self) -> bool:
        return len(self.by) > 1 or (bool(self.by) and time.monotonic() > self._at + STOP_S)

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


# How messages of mpirun, which it frames with lines of dashes, and of ssh begin.
FRAME = b"-" * 70
FRAMED = (b"Primary job ", b"mpirun ", b"prterun ", b"ORTE ", b"PRTE ", b"WARNING: Open MPI ")
UNFRAMED = (b"Connection to ", b"Timeout, server ")


class Story:
    """What mpirun itself says on standard error, kept apart from what the ranks say there."""

    def __init__(self, hosts: Collection[str]) -> None:
        self.rank: int | None = None  # the first that failed
        self.how: str | None = None
        self.lost: str | None = None  # the host that went away, as mpirun says
        self.gone: str | None = None  # the same as ssh says, which may be a rank's own ssh
        self._hosts = hosts
        self._line = b""  # the line that is not whole yet
        self._begun = False  # whether a part of it was given out already
        self._block: list[bytes] = []  # a line of dashes, and the message of mpirun that it begins
        self._held = b""  # messages that only follow from a cause, shown if no cause is found

    def hear(self, chunk: bytes) -> bytes:
        """What of this is for the user; banners that a line of ours replaces are held back."""
        out = b""
        for piece in chunk.splitlines(keepends=True):
            self._line += piece
            if piece.endswith(b"\n"):
                out += self._line if self._begun else self._heard(self._line)
                self._line, self._begun = b"", False
            elif self._begun or not self._may_be_ours():
                out += b"".join(self._block) + self._line
                self._block, self._line, self._begun = [], b"", True
        return out

    def rest(self) -> bytes:
        """What was held back, but for what a line of ours replaces."""
        known = self.rank is not None or self.lost is not None or self.gone is not None
        return (b"" if known else self._held) + b"".join(self._block) + self._line

    def _may_be_ours(self) -> bool:
        """Whether the line that is not whole yet may become one that is held back."""
        signs = [FRAME, *UNFRAMED, *(FRAMED if self._block else ())]
        return len(self._block) > 1 or any(sign.startswith(self._line[: len(sign)]) for sign in signs)

    def _heard(self, line: bytes) -> bytes:
        framing = re.fullmatch(FRAME + rb"-*\s*", line) is not None
        if len(self._block) > 1:
            self._block.append(line)
            if not framing and len(self._block) <= 40:
                return b""
            block, self._block = b"".join(self._block), []
            return b"" if self._understood(block.decode(errors="replace")) else block
        before, self._block = b"".join(self._block), []  # ranks, too, print lines of dashes
        if framing or (before and line.startswith(FRAMED)):
            self._block = [line] if framing else [before, line]
            return before if framing else b""
        return before + (b"" if self._is_consequence(line.decode(errors="replace")) else line)

    def _understood(self, text: str) -> bool:
        """Whether a framed message of mpirun tells what a line of ours will tell."""
        for pattern in BANNERS:
            if (found := re.search(pattern, text, re.DOTALL)) is not None:
                known = found.groupdict()
                if "rank" in known and self.rank is None:
                    self.rank = int(known["rank"])
                    self.how = (
                        f"ended with status {known['status']}" if "status" in known else f"died of {known['signal']}"
                    )
                self.lost = self.lost or known.get("host")
                return True
        return self._is_consequence(text)

    def _is_consequence(self, text: str) -> bool:
        """Whether this follows from a cause that is, or will be, known."""
        if (found := SSH_LOST.match(text)) is not None and found["host"] in self._hosts:
            self.gone = found["host"]
            return True
        if CONSEQUENCES.match(text):
            self._held += text.encode()
            return True
        return False


BANNERS = (
    # Open MPI 4: Process name: [[53071,1],1]; Open MPI 5: [prterun-h1-10042@1,1]
    (
        r"one or more processes exited with non-zero status.*"
        r"Process name: \[[^\n]*,(?P<rank>\d+)\]\s+Exit code:\s+(?P<status>\d+)"
    ),
    r"noticed that process rank (?P<rank>\d+) with PID \d+ on node \S+\s+exited on\s+(?P<signal>signal \d+ \([^)]*\))",
    r"Primary job  terminated normally, but \d+ process",
    r"lost communication with a remote daemon.*Remote daemon: *\S+ on node (?P<host>\S+)",
)
SSH_LOST = re.compile(r"(?:Timeout, server|Connection to) (?P<host>\S+) (?:not responding|closed by remote host)")
# What mpirun adds when a host or a rank is gone.
CONSEQUENCES = re.compile(
    r"-+\n(?:(?:ORTE|PRTE) was unable to reliably start one or more daemons|(?:ORTE|PRTE) does not know how to route"
    r"|WARNING: Open MPI failed to TCP connect to a peer MPI process)|\[[^]\s]+:\d+\] PMIX ERROR"
)


def _copy(launcher: Launcher, story: Story) -> None:
    while chunk := os.read(launcher.errors.fileno(), 65536):
        _show(story.hear(chunk))
    _show(story.rest())


def _show(text: bytes) -> None:
    with contextlib.suppress(OSError):  # nobody reads us any more; the ranks go on
        sys.stderr.buffer.write(text)
        sys.stderr.buffer.flush()


def explain(status: int, story: Story, slots: Sequence[RankSlot], told: Mapping[str, str]) -> str | None:
    """Why the run failed, in one line and the tail of an error file; None where the program has said it itself."""
    if "said" in told:
        return None
    lost, hosts = story.lost or story.gone, {slot.host for slot in slots}
    if lost not in hosts and story.rank is None:  # ssh tells the HostName of ~/.ssh/config, not the name in -H
        lost = silent_host(slots) or lost
    if lost in hosts:
        ranks = [str(slot.rank) for slot in slots if slot.host == lost]
        return f"host {lost} no longer answers; it had rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    rank, words = first_error(Path(told["run_folder"]) / "ranks") if "run_folder" in told else (None, None)
    rank = story.rank if rank is None else rank
    if rank is None or rank >= len(slots):
        return f"the launcher ended with status {status}"
    how = (story.how if rank == story.rank else None) or f"ended the run with status {status}"
    line = f"rank {rank} on {slots[rank].host} {how}"
    return line if words is None else f"{line}{LAST_WORDS}\n{words}"


def in_one_line(explanation: str) -> str:
    """Of a rank's last words only the last, which name the error; below them stands their file."""
    line, *words = explanation.splitlines()
    return f"{line.removesuffix(LAST_WORDS)}: {words[-2].strip()}" if words else line


def read_report(report: Path) -> dict[str, str]:
    """What rank 0 left for us; nothing if it never came so far, or is no program of ours."""
    try:
        return dict(json.loads(report.read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def first_error(folder: Path) -> tuple[int | None, str | None]:
    """The rank whose error file is not only about another rank's end, and the tail of that file."""
    found = []
    for path in folder.glob("rank-*.err"):
        with contextlib.suppress(OSError, ValueError):
            if words := path.read_text(errors="replace").strip():
                tail = "\n".join(f"    {line}" for line in words.splitlines()[-TAIL_LINES:])
                found.append(
                    (SECONDARY.search(words) is not None, int(path.stem.removeprefix("rank-")), f"{tail}\n    {path}")
                )
    return min(found)[1:] if found else (None, None)


def silent_host(slots: Sequence[RankSlot]) -> str | None:
    """The first host that does not answer over ssh any more."""
    hosts = [host for host in dict.fromkeys(slot.host for slot in slots) if not is_local(host)]

    def answers(host: str) -> bool:
        with contextlib.suppress(ProcessError):
            return ask(["ssh", *SSH_OPTIONS, host, "true"], timeout_s=ANSWER_S).status == 0
        return False

    if not hosts:
        return None
    with ThreadPoolExecutor(max_workers=min(32, len(hosts))) as pool:
        return next((host for host, well in zip(hosts, pool.map(answers, hosts), strict=True) if not well), None)
