"""Beside each rank: a process that keeps what the rank writes in logs/<job>/rank-<r>.log, and shows it if asked.

It is forked before the rank becomes the program, whose process stays the one that the launcher has started. It reads
on whatever becomes of its writes: what a full disk does not take is dropped and counted, and no rank waits for it or
dies of it. It ends with the rank's streams, or soon after the rank where another process has inherited them.
"""

import contextlib
import fcntl
import math
import os
import select
import signal
import termios
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

LOGS = "logs"
CHUNK_BYTES = 65_536
PACKET_BYTES = 4096  # PIPE_BUF of Linux, and what Open MPI reads at once
HELD_S = 0.2  # the beginning of a line waits so long for the rest of it
LINGER_S = 0.5  # after a rank's end, what it has started may write for so long
OWN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Streams(NamedTuple):  # dataclasses take a rank long to import
    """Open files: what a rank writes, and where that went before."""

    out: int
    err: int
    launchers_out: int
    launchers_err: int


def new_log(job: str, rank: int) -> int:
    """Open a new file for a rank's words; that of an attempt before stays beside it, its `request` does not.

    No link is followed. OSError where it cannot be made.
    """
    folder = _folder_without(job, rank)
    log = os.open(_name(rank), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
    os.close(folder)
    return log


def put_aside(job: str, rank: int) -> None:
    """Give what a rank wrote in an attempt before its other name; OSError where that cannot be done."""
    os.close(_folder_without(job, rank))


def _folder_without(job: str, rank: int) -> int:
    """The opened folder of a job's logs, without one of this rank."""
    with contextlib.suppress(FileExistsError):
        os.mkdir(LOGS, 0o700)  # noqa: PTH102 (pathlib takes a rank longer to import than all else here)
    logs = os.open(LOGS, OWN_FOLDER)
    with contextlib.suppress(FileExistsError):
        os.mkdir(job, 0o700, dir_fd=logs)
    folder = os.open(job, OWN_FOLDER, dir_fd=logs)
    os.close(logs)
    with contextlib.suppress(FileNotFoundError):
        os.rename(_name(rank), f"rank-{rank}.before.log", src_dir_fd=folder, dst_dir_fd=folder)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(_request_name(rank), dir_fd=folder)
    return folder


def _name(rank: int) -> str:
    return f"rank-{rank}.log"


def _request_name(rank: int) -> str:
    return f"rank-{rank}.show"


def request(job: str, rank: int) -> str:
    """The path of the file with which a rank asks to be shown, as one that does from now on what rank 0 has done."""
    return f"{os.getcwd()}/{LOGS}/{job}/{_request_name(rank)}"  # noqa: PTH109


def start(log: int, rank: int, *, show_all: bool, request: str | None) -> int:
    """Have another process keep what this one, and what it becomes, writes from now on; OSError where it cannot.

    It is shown as it comes, from the `request` on if there is one, or with `show_all` line by line. The answer is
    standard error as it was, which exec closes. The launcher waits until the other process has ended, too: it has the
    launcher's files.
    """
    before_out, before_err = os.dup(1), os.dup(2)
    (out, new_out), (err, new_err) = _stream_like(1), _stream_like(2)
    streams = Streams(out=out, err=err, launchers_out=before_out, launchers_err=before_err)
    rank_end = _end_of_this_process()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            _detach(keep=(log, out, err, before_out, before_err, *rank_end))
            if os.fork() == 0:  # no child of the rank, which may wait for its own
                _forward(streams, RankOutput(streams, Log(log), rank, show_all=show_all, request=request), rank_end)
            status = 0
        except OSError as error:
            status = error.errno or 1
        finally:
            os._exit(status)
    if status := os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):  # nobody would read
        raise OSError(status, os.strerror(status))
    os.dup2(new_out, 1)
    os.dup2(new_err, 2)
    return before_err


def _stream_like(number: int) -> tuple[int, int]:
    """The two ends of a new stream: of a terminal where this is one, since programs then write each line at once."""
    if not os.isatty(number):
        return os.pipe()
    reader, writer = os.openpty()
    settings = termios.tcgetattr(writer)
    settings[1] &= ~termios.OPOST  # bytes stay as they are
    termios.tcsetattr(writer, termios.TCSANOW, settings)
    return reader, writer


def _end_of_this_process() -> tuple[int, ...]:
    """A file that can be read once this process has ended; none where the kernel is older than 5.3."""
    try:
        return (os.pidfd_open(os.getpid()),)
    except (OSError, AttributeError):
        return ()


def _detach(*, keep: Sequence[int]) -> None:
    """Hear none of the rank's signals, and have no files but these."""
    os.setpgid(0, 0)  # mpirun ends the rank's whole group
    for number in STOPS:
        signal.signal(number, signal.SIG_IGN)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)
    for file in map(int, os.listdir("/proc/self/fd")):  # noqa: PTH208
        if file > 2 and file not in keep:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(file)


def _forward(streams: Streams, output: "RankOutput", rank_end: Sequence[int]) -> None:
    """Read all that the rank writes, until nobody can write any more or the rank has ended for some time."""
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
    """What is there; nothing at the end."""
    try:
        return os.read(file, CHUNK_BYTES)
    except OSError:  # so ends a terminal
        return b""


class RankOutput:
    """What a rank writes: shown as it comes or in whole lines, kept in whole lines."""

    def __init__(self, streams: Streams, log: "Log", rank: int, *, show_all: bool, request: str | None) -> None:
        self.due = math.inf  # on time.monotonic(): when the next line has waited long enough for its rest
        self._log = log
        self._lines = {streams.out: Line(), streams.err: Line()}
        self._launchers = {streams.out: streams.launchers_out, streams.err: streams.launchers_err}
        self._shown = not show_all and request is None  # as it comes
        self._request = request
        self._marked_output: int | None = None  # where whole lines go
        self._mark = b"[%d] " % rank
        if show_all:
            self._marked_output = streams.launchers_err
            with contextlib.suppress(OSError):  # it is no pipe
                # Open MPI reads as many bytes as there are, of several ranks in turn: a packet comes alone and whole.
                fcntl.fcntl(
                    self._marked_output, fcntl.F_SETFL, fcntl.fcntl(self._marked_output, fcntl.F_GETFL) | os.O_DIRECT
                )

    def feed(self, stream: int, chunk: bytes) -> None:
        """The rank has written this."""
        if not self._shown and self._request is not None:
            with contextlib.suppress(OSError):  # the rank has not asked
                os.unlink(self._request)  # noqa: PTH108 (pathlib takes a rank longer to import than all else here)
                self._shown = True
        if self._shown:
            put(self._launchers[stream], chunk)
        self._pass_on(stream, self._lines[stream].complete_lines(chunk, time.monotonic()))

    def flush(self, now: float) -> None:
        """Wait no longer for the rest of lines that are due."""
        for stream, line in self._lines.items():
            if line.due <= now:
                self._pass_on(stream, line.rest())
        self.due = min(line.due for line in self._lines.values())

    def _pass_on(self, stream: int, text: bytes) -> None:
        if text and self._marked_output is not None:
            for line in marked(text, self._mark):
                put(self._marked_output, line)
        if text:
            self._log.write(stream, text)


class Line:
    """The beginning of a line, which waits for its rest."""

    def __init__(self) -> None:
        self.due = math.inf
        self._begun = b""

    def complete_lines(self, chunk: bytes, now: float) -> bytes:
        """The lines that this chunk makes whole; all there is where one would be too long to wait for."""
        text = self._begun + chunk
        end = text.rfind(b"\n") + 1 or (len(text) if len(text) >= CHUNK_BYTES else 0)
        if end or not self._begun:
            self.due = now + HELD_S
        self._begun = text[end:]
        if not self._begun:
            self.due = math.inf
        return text[:end]

    def rest(self) -> bytes:
        """All that has waited."""
        begun, self._begun, self.due = self._begun, b"", math.inf
        return begun


class Log:
    """A rank's file: lines of its two streams do not mix, and where bytes are missing it says how many."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._unended: int | None = None  # the stream whose last line there is not whole
        self._lost = 0

    def write(self, stream: int, text: bytes) -> None:
        """Add what one of the streams has written; what does not fit is dropped."""
        if self._unended not in (None, stream):
            text = b"\n" + text
        if self._lost and put(self._file, b"\n[hvdlaunch: %d bytes could not be written here]\n" % self._lost) == 0:
            self._lost = 0
        self._lost += len(text) if self._lost else put(self._file, text)
        self._unended = None if text.endswith(b"\n") else stream


def put(file: int, text: bytes) -> int:
    """Write all of it as far as that works; how many bytes are left."""
    with contextlib.suppress(OSError):
        while text:
            text = text[os.write(file, text) :]
    return len(text)


def marked(text: bytes, mark: bytes) -> Iterator[bytes]:
    """The lines of a text, each with the mark before it, in packets; of a line that is drawn anew its last state."""
    room = PACKET_BYTES - len(mark) - 1
    for line in text.removesuffix(b"\n").split(b"\n"):
        last = line.rstrip(b"\r").rpartition(b"\r")[2]
        for at in range(0, max(len(last), 1), room):
            yield mark + last[at : at + room] + b"\n"
