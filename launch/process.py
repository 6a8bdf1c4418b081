"""Runs helper programs and the launcher; the only file that starts a process."""

import contextlib
import ctypes
import os
import selectors
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from launch.errors import ProcessError

PIPE = subprocess.PIPE
PR_SET_PDEATHSIG = 1  # linux/prctl.h
# mpirun needs about one second to end its ranks on all hosts.
TERMINATE_S = 2.0
GUARD = [b"-m", b"launch.run.rank.bind"]  # in the command of a process that leaves its rank a moment for its last words
LAST_WORDS_S = 1.2  # for that, with some room
MAX_BYTES = 16 << 20  # limit of an answer; a topology has a few thousand bytes
INPUT_BYTES = 1 << 20
ALONE_S = 10.0  # without a child process: a launcher that has ended its ranks needs about one second
LINGER_S = 0.5  # time for a program's child processes to write after its end
ASKED = "HVDLAUNCH_ASKED"  # in the environment of a program and of what it starts


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The output of a program that has ended."""

    status: int  # negative: killed by this signal
    out: str
    err: str


def find(program: str, folders: str | None = None) -> str | None:
    """Return the path of the program that a shell with this PATH, by default ours, runs; links are not resolved.

    None if the program is missing.
    """
    path = shutil.which(program, path=folders)
    return None if path is None else os.path.abspath(path)  # noqa: PTH100 (resolve() would leave a virtual environment)


def ask(
    argv: Sequence[str], *, timeout_s: float, env: Mapping[str, str] | None = None, ends_daemons: bool = False
) -> Answer:
    """Run a program without input until it ends; ProcessError if it is missing, too slow or writes too much.

    Its process group ends with it. `ends_daemons` also ends what has left the group; ssh may leave a shared connection.
    """
    token = uuid4().hex
    if ends_daemons:
        env = {**(os.environ if env is None else env), ASKED: token}
    try:
        process = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=env,
            start_new_session=True,
        )
    except OSError as error:
        raise ProcessError(f"{argv[0]} cannot be started: {error.strerror}") from error
    _RUNNING.add(process)
    try:
        out, err = _read(process, argv[0], timeout_s)
        status = process.wait(1)
    except subprocess.TimeoutExpired as error:  # it may stay alive with closed pipes
        raise ProcessError(f"{argv[0]} gave no answer in {timeout_s:g} s") from error
    finally:
        _kill(process)
        _RUNNING.discard(process)
        if ends_daemons:
            _end(lambda pid, _: f"{ASKED}={token}".encode() in variables(pid), signal.SIGKILL)
    return Answer(status=status, out=out.decode(errors="replace"), err=err.decode(errors="replace"))


def stop_asking() -> None:
    """End every program that `ask` is running, in any thread."""
    for process in list(_RUNNING):
        _kill(process)


_RUNNING: set[subprocess.Popen[bytes]] = set()


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):  # its children keep the pipes open
        os.killpg(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # it may be blocked in a driver
        process.wait(0.5)


def _read(process: subprocess.Popen[bytes], name: str, timeout_s: float) -> tuple[bytes, bytes]:
    """Read all standard output and standard error of the process."""
    assert process.stdout is not None
    assert process.stderr is not None
    output = {process.stdout: bytearray(), process.stderr: bytearray()}
    deadline = time.monotonic() + timeout_s
    with process.stdout, process.stderr, selectors.DefaultSelector() as both:
        for stream in output:
            both.register(stream, selectors.EVENT_READ)
        while both.get_map():
            ended = process.poll() is not None
            ready = both.select(max(0.0, min(deadline - time.monotonic(), LINGER_S)))
            if not ready and ended:  # others hold the pipes
                break
            if not ready and time.monotonic() >= deadline:
                said = output[process.stderr].decode(errors="replace").splitlines()
                raise ProcessError(f"{name} gave no answer in {timeout_s:g} s", said)
            for key, _ in ready:
                chunk = os.read(key.fd, 65536)
                if not chunk:
                    both.unregister(key.fileobj)
                output[key.fileobj] += chunk  # type: ignore[index]
            if sum(map(len, output.values())) > MAX_BYTES:
                raise ProcessError(f"{name} printed more than {MAX_BYTES >> 20} MiB, which is too much")
    return bytes(output[process.stdout]), bytes(output[process.stderr])


class BackgroundProcess:
    """A program that runs at the same time as a launcher; ProcessError if it is missing.

    Its input is `text`, with what `write` adds, and stays open until `end`; without a text there is none. Its output is
    discarded, unless `out` is PIPE: then the caller reads it.
    """

    def __init__(self, argv: Sequence[str], *, text: str | None = None, out: int = subprocess.DEVNULL) -> None:
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL if text is None else subprocess.PIPE,
                pipesize=-1 if text is None else INPUT_BYTES,  # this process does not wait for a reader
                stdout=out,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        except OSError as error:
            raise ProcessError(f"{argv[0]} cannot be started: {error.strerror}") from error
        self._out = self._process.stdout
        if self._out is not None:
            os.set_blocking(self._out.fileno(), False)
        self.write(text or "")

    def read(self) -> bytes:
        """Return what it has printed since the last call, without waiting."""
        return (self._out and self._out.read()) or b""

    def write(self, text: str) -> None:
        """Add to its input, as long as it reads."""
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.write(text.encode())
                self._process.stdin.flush()

    def status(self) -> int | None:
        """Return its exit status, negative after a signal; None if it still runs."""
        return self._process.poll()

    def end(self) -> None:
        """End it, if it still runs."""
        _kill(self._process)
        if self._process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        if self._out is not None:
            self._out.close()


class LauncherProcess:
    """A running launcher in its own session, which ends when this process ends for any reason.

    The caller reads its standard error from `errors`. `folder` is removed at the end. `out` is the open file for its
    standard output; None means ours, and with PIPE the caller reads `output`. Signals go to the first program that is
    named in `receivers`.
    """

    def __init__(
        self,
        argv: Sequence[str],
        *,
        env: Mapping[str, str],
        folder: Path,
        out: int | None = None,
        receivers: Collection[str] = (),
    ) -> None:
        self._receivers = receivers
        try:
            self._process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.PIPE,
                env=env,
                start_new_session=True,
                preexec_fn=_end_with_parent,  # noqa: PLW1509 (no other thread of ours runs now)
            )
        except OSError as error:
            folder.rmdir()
            raise ProcessError(f"{argv[0]} cannot be started: {error.strerror}") from error
        assert self._process.stderr is not None
        self.errors, self.output = self._process.stderr, self._process.stdout
        self.pid, self._folder = self._process.pid, folder
        self._had_child_at: float | None = None
        self._keeper = _keep(self.pid, folder)

    def signal(self, number: int) -> None:
        """Send a signal to the program that passes it on to the ranks."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(_oldest(self.pid, self._receivers) or self.pid, number)

    def wait(self, timeout_s: float | None = None) -> int | None:
        """Return the exit status, 128 + signal after a signal; None if it still runs after `timeout_s`."""
        try:
            status = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        return 128 - status if status < 0 else status

    def is_alone(self) -> bool:
        """Return whether it had child processes, and has had none for ALONE_S.

        mpirun waits without an end for the daemon of a silent host if its ssh ended while the ranks were being ended.
        """
        with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
            if any(file.read_text() for file in Path(f"/proc/{self.pid}/task").glob("*/children")):
                self._had_child_at = time.monotonic()
            return self._had_child_at is not None and time.monotonic() > self._had_child_at + ALONE_S
        return False

    def end(self) -> None:
        """End all its processes, and those that the ranks on this host have started."""
        if self.wait(0) is not None:
            wait_for_last_words(lambda _, facts: facts.session == self.pid)
        _end_run(self.pid, self._folder)
        self._process.wait()
        keeper, writer = self._keeper
        os.close(writer)
        os.waitpid(keeper, 0)


def _end_with_parent() -> None:
    """Request SIGTERM when the thread that forked this process ends: the keeper may be killed, too."""
    with contextlib.suppress(AttributeError):  # the C library has no prctl
        _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


_LIBC = ctypes.CDLL(None)  # loaded before any fork


def _keep(session: int, folder: Path) -> tuple[int, int]:
    """Fork a process that cleans up when this one is gone; return its pid and the pipe that it watches."""
    reader, writer = os.pipe()
    if keeper := os.fork():
        os.close(reader)
        return keeper, writer
    try:
        os.setsid()
        os.close(writer)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)
        devnull = os.open(os.devnull, os.O_RDWR)
        for standard in (0, 1, 2):
            os.dup2(devnull, standard)
        os.read(reader, 1)  # returns when this process is gone: nothing is ever written
        _end_run(session, folder)
        shutil.rmtree(folder, ignore_errors=True)
    finally:
        os._exit(0)


def _end_run(session: int, folder: Path) -> None:
    """End a launcher's session, and those of its ranks and their daemons: bind has marked the environment of these.

    Daemons of the launcher itself continue, such as a connection that other commands of ssh share, and a session whose
    leader is not of the run, such as a keeper's.
    """
    report, sessions = os.fsencode(f"HVDLAUNCH_REPORT={folder}/"), {session}

    def is_marked(pid: int) -> bool:
        found = b"\0".join([b"", *variables(pid)])
        return b"\0" + report in found and b"\0HVDLAUNCH_RANK=" in found

    def is_of_run(pid: int, facts: "Stat") -> bool:
        if facts.session in sessions:
            return True
        above = stat(facts.parent) if facts.session == pid and _is_guard(facts.parent) else None
        if above is not None and above.session == session:  # a rank, which may have cleared its environment
            sessions.add(pid)
            return True
        if not is_marked(pid):
            return False
        if stat(facts.session) is None or is_marked(facts.session):
            sessions.add(facts.session)  # a process in it need not have the environment
        return True

    _end(is_of_run, signal.SIGTERM, signal.SIGKILL)


def wait_for_last_words(is_of_run: Callable[[int, "Stat"], bool]) -> None:
    """Wait for the guards of a run whose launcher has ended; their ranks had a signal to end, too."""
    deadline = time.monotonic() + LAST_WORDS_S
    found = processes().items()
    guards = [pid for pid, facts in found if _is_guard(pid) and is_of_run(pid, facts)]
    while any((facts := stat(pid)) and facts.state != "Z" for pid in guards) and time.monotonic() < deadline:
        time.sleep(0.01)


def _is_guard(pid: int) -> bool:
    return command_of(pid).split(b"\0")[2:4] == GUARD


def _end(is_one: Callable[[int, "Stat"], bool], *numbers: signal.Signals) -> None:
    """Send the signals to these processes one after the other, with TERMINATE_S to end after each."""

    def left() -> list[int]:
        return [pid for pid, facts in processes().items() if facts.state != "Z" and is_one(pid, facts)]

    for number in numbers:
        deadline = time.monotonic() + TERMINATE_S
        if not (pids := left()):
            return
        for pid in pids:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        while left() and time.monotonic() < deadline:
            time.sleep(0.02)


@dataclass(frozen=True, kw_only=True)
class Stat:
    """The kernel's facts about a process."""

    state: str  # Z: ended, but not waited for
    parent: int
    session: int
    started_s: float  # on CLOCK_BOOTTIME


def stat(pid: int) -> Stat | None:
    """Read /proc/PID/stat; return None if there is no such process."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()  # any name
        return Stat(
            state=fields[0],
            parent=int(fields[1]),
            session=int(fields[3]),
            started_s=int(fields[19]) / os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, IndexError):  # the process may end during the read
        return None


def variables(pid: int) -> list[bytes]:
    """Return the environment with which a process of this user was started; empty if it has ended."""
    try:
        if Path(f"/proc/{pid}").stat().st_uid != os.getuid():
            return []
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def command_of(pid: int) -> bytes:
    """Return the words of a process, each with a zero byte after it; empty if it has ended."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def processes() -> dict[int, Stat]:
    """Return all processes."""
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()]
    return {pid: facts for pid in pids if (facts := stat(pid)) is not None}


def _oldest(session: int, names: Collection[str]) -> int | None:
    """Return the oldest process of a session that was started as a program of one of these names."""
    # The name in /proc/PID/comm differs: Open MPI's wheel starts mpirun as orterun_wrapper.
    return min(
        (
            pid
            for pid, facts in processes().items()
            if facts.session == session and Path(os.fsdecode(command_of(pid)).partition("\0")[0]).name in names
        ),
        default=None,
    )
