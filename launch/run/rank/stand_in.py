"""Two processes that stand for a rank's program: they pass signals on, and end as the program ends.

A launcher that ends its processes gives them no time, and ends their whole groups. So the one that it has started has a
fork, the guard, in a group of its own: if the first one is killed, the guard requests the program's end, and leaves it
LAST_WORDS_S. The program is a fork of this host's keeper (launch.run.rank.keeper), or starts by itself on any doubt.
"""

import contextlib
import ctypes
import json
import math
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Mapping
from typing import NoReturn

SHARED_MEMORY = "/dev/shm"  # noqa: S108
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LAST_WORDS_S = 1.0
ANSWER_S = 20.0  # for a keeper, which forks in a few hundredths of a second once it has imported
PASSED_ON = tuple(getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT"))


class Child:
    """A program that started by itself."""

    files: tuple[int, ...] = ()  # that become readable at its end; here the kernel sends SIGCHLD

    def __init__(self, pid: int) -> None:
        self.pid = pid

    def status(self) -> int | None:
        """Return its exit status, or minus the signal that has killed it; None if it still runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None


class Fork:
    """A program that is a fork of the keeper, which reports its status; the kernel kills it without a `lifeline`.

    If the keeper has ended, the status is what the program itself has reported over its lifeline.
    """

    def __init__(self, pid: int, keeper: socket.socket, lifeline: socket.socket) -> None:
        self.pid, self.files = pid, (os.pidfd_open(pid),)
        self._reports = (keeper, lifeline)

    def status(self) -> int | None:
        """Return its exit status, or minus the signal that has killed it; None if it still runs."""
        if not select.select(self.files, [], [], 0)[0]:
            return None
        for report in self._reports:
            with contextlib.suppress(OSError, ValueError):
                return int(report.recv(16))
        return -signal.SIGKILL


def become_guard() -> int:
    """Fork a guard and return there a file that becomes readable at the end of this process, which never returns."""
    launcher, writer = os.pipe()
    if guard := os.fork():
        os.close(launcher)
        for number in not_ignored():
            signal.signal(number, lambda number, _: _kill(guard, number))
        end_as(os.waitstatus_to_exitcode(os.waitpid(guard, 0)[1]))
    os.close(writer)
    os.setpgid(0, 0)
    return launcher


def start(file: str, words: list[str], launcher: int, errors: int, keepers_socket: str, *, in_session: bool) -> None:
    """Start the program and stand for it, with `errors` as standard output; return in a child that is to become it.

    The program is in a process group of its own, or `in_session` in a session of its own.
    """
    wakes = wake_at(*not_ignored(), signal.SIGCHLD)
    program: Child | Fork | None = ask_keeper(keepers_socket, file, words, in_session=in_session)
    if program is None:
        own, writer = os.pipe()
        guard, pid = os.getpid(), os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            for number in (*not_ignored(), signal.SIGCHLD):
                signal.signal(number, signal.SIG_DFL)
            os.setsid() if in_session else os.setpgid(0, 0)
            os.close(writer)
            die_with(guard)
            return
        os.close(writer)
        os.read(own, 1)  # returns once it has a group of its own
        program = Child(pid)
    for standard in (1, 2):  # else the forwarder would wait for this process to end
        os.dup2(errors, standard)
    status = stand_for(program, wakes, launcher)
    end_rest(program.pid)
    remove_segment(os.environ)
    end_as(status)


def end_rest(leader: int) -> None:
    """End what a program has left in its session or group without the environment by which hvdlaunch finds it."""
    until = time.monotonic() + LAST_WORDS_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        left = _unmarked(leader)
        for pid in left:
            _kill(pid, number)
        while left and time.monotonic() < until:
            time.sleep(0.01)
            left = _unmarked(leader)


def _unmarked(leader: int) -> list[int]:
    """Return the processes of a session or a group whose environment is not that of a rank."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):  # noqa: PTH208
        with contextlib.suppress(OSError):
            pid = int(name)
            # readlink raises OSError if it has ended
            if leader in (os.getsid(pid), os.getpgid(pid)) and os.readlink(f"/proc/{name}/exe"):  # noqa: PTH115 (pathlib is slow)
                with open(f"/proc/{name}/environ", "rb") as variables:  # noqa: PTH123
                    found += [] if b"HVDLAUNCH_RANK=" in variables.read() else [pid]
    return found


def remove_segment(environment: Mapping[str, str]) -> None:
    """Remove the file in SHARED_MEMORY by which Open MPI shares memory with this rank; a killed mpirun leaves it."""
    with contextlib.suppress(KeyError, ValueError, OSError):
        rank, space = environment["OMPI_COMM_WORLD_LOCAL_RANK"], environment.get("PMIX_NAMESPACE", "")
        if space.startswith("prterun-"):
            start, job = "sm_segment.", job_of(space)
        else:
            start, job = "vader_segment.", int(environment["OMPI_MCA_ess_base_jobid"])
        for name in os.listdir(SHARED_MEMORY):  # noqa: PTH208
            if name.startswith(start) and name.endswith(f".{os.geteuid()}.{job:x}.{rank}"):
                os.unlink(f"{SHARED_MEMORY}/{name}")  # noqa: PTH108


def job_of(space: str) -> int:
    """Return the number of a job of Open MPI 5 by its PMIx namespace: opal_pmix_convert_nspace of opal/mca/pmix/base.

    Its upper half is Jenkins's one-at-a-time hash of the first part, folded to 16 bits.
    """
    family, _, number = space.rpartition("@")
    hashed = 0
    for byte in family.encode():
        hashed = (hashed + byte) * 0x401 & 0xFFFFFFFF
        hashed ^= hashed >> 6
    hashed = hashed * 9 & 0xFFFFFFFF
    hashed = (hashed ^ hashed >> 11) * 0x8001 & 0xFFFFFFFF
    return (hashed >> 16 ^ hashed & 0xFFFF) << 16 | int(number) & 0xFFFF


def ask_keeper(name: str, file: str, words: list[str], *, in_session: bool) -> Fork | None:
    """Let this host's keeper start a program as a fork that takes this process's place; None on any doubt.

    The fork waits for this process to have received its process id, and ends if it has not.
    """
    if not name or not hasattr(os, "pidfd_open"):
        return None
    umask = os.umask(0o077)
    os.umask(umask)
    with open("/proc/self/oom_score_adj") as score:  # noqa: PTH123 (importing pathlib is slow)
        oom_score_adj = score.read()
    request = {
        "file": file,
        "words": words,
        "in_session": in_session,
        "environment": dict(os.environ),
        "folder": os.getcwd(),  # noqa: PTH109
        "oom_score_adj": oom_score_adj,
        "umask": umask,
        "cores": list(os.sched_getaffinity(0)),
        "limits": {each: resource.getrlimit(getattr(resource, each)) for each in dir(resource) if "RLIMIT_" in each},
        "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "ignored": [number for number in PASSED_ON if signal.getsignal(number) == signal.SIG_IGN],
    }
    keeper = socket.socket(socket.AF_UNIX)
    try:
        keeper.settimeout(ANSWER_S)
        keeper.connect(f"\0{name}")
        pid, user = process_of(keeper)
        with open(f"/proc/{pid}/stat") as stat:  # noqa: PTH123
            is_stopped = stat.read().rpartition(")")[2].split()[0] == "T"
        if user != os.getuid() or is_stopped:
            raise PermissionError
        own_end, its_end = socket.socketpair()
        own_end.settimeout(0)
        socket.send_fds(keeper, [b"\n"], [0, 1, 2, its_end.fileno()])
        its_end.close()
        keeper.sendall(json.dumps(request).encode() + b"\n")
        fork = Fork(int(keeper.recv(16)), keeper, own_end)
        keeper.sendall(b"\n")
    except (OSError, ValueError):  # also of a folder or a variable that is not UTF-8
        keeper.close()
        return None
    return fork


def process_of(peer: socket.socket) -> tuple[int, int]:
    """Return the process at the other end, and its user."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", credentials)
    return pid, user


def stand_for(program: Child | Fork, wakes: int, launcher: int | None = None) -> int:
    """Pass on the signals that arrive at `wakes` until the program has ended; return its status.

    Once `launcher` is readable, the program gets SIGTERM, unless it had that, and after LAST_WORDS_S SIGKILL.
    """
    poll, until, is_asked = select.poll(), math.inf, False
    for file in (wakes, *program.files, *(() if launcher is None else (launcher,))):
        poll.register(file, select.POLLIN)
    while (status := program.status()) is None:
        for file, _ in poll.poll(None if until == math.inf else max(0, 1000 * (until - time.monotonic()))):
            if file == wakes:
                for number in os.read(wakes, 64):
                    if number in PASSED_ON:
                        is_asked |= number == signal.SIGTERM
                        _kill(-program.pid, number)
            elif file == launcher:
                poll.unregister(launcher)
                until = time.monotonic() + LAST_WORDS_S
                if not is_asked:
                    _kill(-program.pid, signal.SIGTERM)
        if time.monotonic() >= until:
            until = math.inf
            _kill(-program.pid, signal.SIGKILL)
    return status


def not_ignored() -> list[signal.Signals]:
    """Return the signals to pass on."""
    return [number for number in PASSED_ON if signal.getsignal(number) != signal.SIG_IGN]


def wake_at(*numbers: int) -> int:
    """Return a file into which the numbers of these signals are written as they arrive."""
    wakes, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in numbers:
        signal.signal(number, lambda *_: None)
    return wakes


def end_as(status: int) -> NoReturn:
    """End this process with an exit status, or by minus the signal that has killed another."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {-status})
        os.kill(os.getpid(), -status)
    os._exit(status)


def die_with(parent: int) -> None:
    """Request SIGKILL when this parent ends; this survives exec."""
    with contextlib.suppress(AttributeError):  # the C library has no prctl
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


def _kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)
