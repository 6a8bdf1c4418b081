"""A process next to each rank that saves the rank's output in logs/<job>/rank-<r>.log, and shows that of rank 0.

It is forked before the rank becomes the program, which keeps the process id that the launcher knows. It continues to
read even if its writes fail: what does not fit on a full disk is dropped and counted, so that a rank never waits for it
or dies of it. It ends with the rank's streams, or soon after the rank if another process has inherited them. Its parent
keeps the streams open and replaces it if it dies.
"""

import contextlib
import fcntl
import math
import os
import select
import signal
import struct
import termios
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

LOGS = "logs"
TORCH_CALLS = "torch-calls-"  # of each rank, by torch
CHUNK_BYTES = 65_536
PACKET_BYTES = 4096  # PIPE_BUF of Linux, and the size of Open MPI's reads
OUT = b"\x1f"  # before a marked line of standard output: hvdlaunch prints it there
HELD_S = 0.2  # maximum wait for the rest of an incomplete line
LINGER_S = 0.5  # time for a rank's child processes to write after its end
OWN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


Size = tuple[int, int] | None  # lines and columns


class Streams(NamedTuple):  # the import of dataclasses is slow
    """Open files: the rank's output, and its original destinations."""

    out: int
    err: int
    launchers_out: int
    launchers_err: int


def new_log(job: str, rank: int) -> int:
    """Create a log file for a rank, once that of an earlier attempt is rotated; OSError if it cannot be created."""
    folder = rotate_log(job, rank)
    log = os.open(f"rank-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    os.close(folder)
    return log


def _reopened(path: str) -> int:
    """Open a log to append to it; without one the output is shown only."""
    try:
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return os.open(os.devnull, os.O_WRONLY)


def rotate_log(job: str, rank: int) -> int:
    """Rename the log of an earlier attempt, and remove its dump; OSError if that fails.

    Returns the opened folder of the job's logs. Links are not followed.
    """
    with contextlib.suppress(FileExistsError):
        os.mkdir(LOGS, 0o700)  # noqa: PTH102 (importing pathlib takes longer than the rest of this file)
    logs = os.open(LOGS, OWN_FOLDER)
    with contextlib.suppress(FileExistsError):
        os.mkdir(job, 0o700, dir_fd=logs)
    folder = os.open(job, OWN_FOLDER, dir_fd=logs)
    os.close(logs)
    with contextlib.suppress(FileNotFoundError):
        os.rename(f"rank-{rank}.log", f"rank-{rank}.before.log", src_dir_fd=folder, dst_dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{TORCH_CALLS}{rank}", dir_fd=folder)
    return folder


def start(log: int, rank: int, *, show_all: bool, terminals: Sequence[Size]) -> int:
    """Fork a process that saves all further output of this process and its program; OSError if that fails.

    Rank 0's output is shown immediately, or that of all ranks line by line with `show_all`.
    Standard output and standard error become `terminals` of this size, or pipes. The result is a copy of standard
    error, which exec closes. The launcher also waits for the end of the other process, which has the launcher's files.
    """
    before_out, before_err = os.dup(1), os.dup(2)
    (out, new_out), (err, new_err) = map(_new_stream, terminals)
    streams = Streams(out=out, err=err, launchers_out=before_out, launchers_err=before_err)
    rank_end = _end_of_this_process()

    log_file = os.readlink(f"/proc/self/fd/{log}")  # noqa: PTH115 (importing pathlib is slow)

    def forward() -> None:
        output = RankOutput(streams, RankLog(_reopened(log_file)), rank, show_all=show_all)
        _forward(streams, output, rank_end)

    child = os.fork()
    if child == 0:
        status = 1
        try:
            _detach(keep=(*streams, *rank_end))
            if os.fork() == 0:  # not a child of the rank, which may wait for its children
                _keep_running(forward)
            status = 0
        except OSError as error:
            status = error.errno or 1
        finally:
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):  # no reader would exist
        raise OSError(status, os.strerror(status))
    os.dup2(new_out, 1)
    os.dup2(new_err, 2)
    return before_err


def _new_stream(size: Size) -> tuple[int, int]:
    """Return both ends of a new stream, a terminal of this size or a pipe."""
    if size is None:
        return os.pipe()
    reader, writer = os.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # bytes are not changed
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    fcntl.ioctl(writer, termios.TIOCSWINSZ, struct.pack("4H", *size, 0, 0))
    return reader, writer


def _end_of_this_process() -> tuple[int, ...]:
    """Return a file that becomes readable when this process ends; empty for kernels before 5.3."""
    try:
        return (os.pidfd_open(os.getpid()),)
    except (OSError, AttributeError):
        return ()


def _detach(*, keep: Sequence[int]) -> None:
    """Leave the rank's signals, and close all files except these."""
    os.setpgid(0, 0)  # mpirun ends the rank's whole group
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    for file in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if file > 2 and file not in keep:
            with contextlib.suppress(OSError):  # the descriptor of the listing itself
                os.close(file)


def _keep_running(forward: Callable[[], None]) -> None:
    """Call the function in a child process, and again if that dies."""
    while True:
        try:
            child = os.fork()
        except OSError:  # no more processes
            return forward()
        if child == 0:
            status = 1
            try:
                forward()
                status = 0
            finally:
                os._exit(status)
        if os.waitpid(child, 0)[1] == 0:
            return None
        time.sleep(HELD_S)


def _forward(streams: Streams, output: "RankOutput", rank_end: Sequence[int]) -> None:
    """Forward the rank's output until all writers are gone, or some time after the rank has ended."""
    poll, until = select.poll(), math.inf
    unended = {streams.out, streams.err}
    for file in (*unended, *rank_end):
        poll.register(file, select.POLLIN)
    while unended and (now := time.monotonic()) < until:
        wait_s = min(until, output.due) - now
        for file, _ in poll.poll(None if wait_s == math.inf else max(0, math.ceil(1000 * wait_s))):
            if file in rank_end:
                poll.unregister(file)
                until = time.monotonic() + LINGER_S
            elif chunk := _read(file):
                output.feed(file, chunk)
            else:
                poll.unregister(file)
                unended.remove(file)
        output.flush(time.monotonic())
    output.flush(math.inf)


def _read(file: int) -> bytes:
    """Read the available bytes; empty at the end."""
    try:
        return os.read(file, CHUNK_BYTES)
    except OSError:  # a terminal ends like this
        return b""


class RankOutput:
    """The output of a rank: shown immediately or in complete lines, saved in complete lines."""

    def __init__(self, streams: Streams, log: "RankLog", rank: int, *, show_all: bool) -> None:
        self.due = math.inf  # on time.monotonic(): when the next incomplete line is due
        self._log = log
        self._lines = {streams.out: Line(), streams.err: Line()}
        self._launchers = {streams.out: streams.launchers_out, streams.err: streams.launchers_err}
        self._shown = rank == 0 and not show_all  # immediately
        self._marked_output = streams.launchers_err if show_all else None  # destination of complete lines
        self._marks = {streams.out: OUT + b"[%d] " % rank, streams.err: b"[%d] " % rank}
        if show_all:
            with contextlib.suppress(OSError):  # it is not a pipe
                # Open MPI reads all available bytes, of several ranks in turn: a packet arrives as a whole. Standard
                # output has no packets: Open MPI makes it a terminal.
                flags = fcntl.fcntl(streams.launchers_err, fcntl.F_GETFL)
                fcntl.fcntl(streams.launchers_err, fcntl.F_SETFL, flags | os.O_DIRECT)

    def feed(self, stream: int, chunk: bytes) -> None:
        """Process output of the rank."""
        if self._shown:
            put(self._launchers[stream], chunk)
        self._pass_on(stream, self._lines[stream].complete_lines(chunk, time.monotonic()))

    def flush(self, now: float) -> None:
        """Write incomplete lines that are due."""
        for stream, line in self._lines.items():
            if line.due <= now:
                self._pass_on(stream, line.rest())
        self.due = min(line.due for line in self._lines.values())

    def _pass_on(self, stream: int, text: bytes) -> None:
        if text and self._marked_output is not None:
            for line in marked(text, self._marks[stream]):
                put(self._marked_output, line)
        if text:
            self._log.write(stream, text)


class Line:
    """An incomplete line."""

    def __init__(self) -> None:
        self.due = math.inf
        self._begun = b""

    def complete_lines(self, chunk: bytes, now: float) -> bytes:
        """Return the lines that this chunk completes; everything if a line would become too long."""
        text = self._begun + chunk
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) >= CHUNK_BYTES else 0)
        if end or not self._begun:
            self.due = now + HELD_S
        self._begun = text[end:]
        if not self._begun:
            self.due = math.inf
        return text[:end]

    def rest(self) -> bytes:
        """Return the incomplete rest."""
        begun, self._begun, self.due = self._begun, b"", math.inf
        return begun


class RankLog:
    """A rank's log: lines of its two streams are not mixed, and missing bytes are reported."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._unended: int | None = None  # the stream of an incomplete last line
        self._lost = 0

    def write(self, stream: int, text: bytes) -> None:
        """Append output of one stream; what does not fit is dropped."""
        if self._unended not in (None, stream):
            text = b"\n" + text
        if self._lost and put(self._file, b"\n[hvdlaunch: %d bytes could not be written here]\n" % self._lost) == 0:
            self._lost = 0
        self._lost += len(text) if self._lost else put(self._file, text)
        self._unended = None if text.endswith(b"\n") else stream


def put(file: int, text: bytes) -> int:
    """Write as much as possible; return the number of remaining bytes."""
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(file, text) :]
    return len(text)


def marked(text: bytes, mark: bytes) -> Iterator[bytes]:
    """Yield the lines in packets, each with the mark before it; of a redrawn line only its last state."""
    room = PACKET_BYTES - len(mark) - 1
    for line in text.removesuffix(b"\n").split(b"\n"):
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        for at in range(0, max(len(last), 1), room):
            yield mark + last[at : at + room] + b"\n"
