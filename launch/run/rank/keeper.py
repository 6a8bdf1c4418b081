"""Keeps a process on a host that has imported what ranks import: later ranks are forks of it, and start at once.

    python keeper.py REPORT NAME        on a host with ranks of a run; names of modules come on standard input, with
                                        which the keeper ends

The interpreter is that of the ranks, which need not have hvdlaunch; so is the environment. The keeper never computes:
threads, MPI and Horovod start in its forks. Standard library only; launch.run.rank.stand_in is the other side.
"""

import contextlib
import ctypes
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import select
import signal
import socket
import struct
import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

# Variables that Python or a library reads when it is loaded.
FIXED = ("PYTHON", "LD_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "BLIS_", "PYTORCH_", "MALLOC_", "GLIBC_")
ROOM = "HVDLAUNCH_ROOM"  # of the keeper: memory for what other processes read of its forks
ROOM_BYTES = 16_384
OOM = Path("/proc/self/oom_score_adj")
PEER_S = 5.0  # for the rest of a request
READ_BYTES = 1 << 24


def begin(report: str, name: str) -> NoReturn:
    """Start this program again, in the environment of a rank of this run on this host; status 1 if there is none.

    It starts once it has read all names, which may be after the run.
    """
    for process in Path("/proc").glob("[0-9]*"):
        variables: dict[str, str] = {}
        with contextlib.suppress(OSError):
            texts = os.fsdecode((process / "environ").read_bytes()).split("\0")
            variables = {variable: value for variable, _, value in (text.partition("=") for text in texts) if variable}
        if variables.get("HVDLAUNCH_REPORT") == report and "RANK" in variables and ROOM not in variables:
            break
    else:
        sys.exit(f"no rank of {report}")
    text = b""
    while not text.endswith(b"\n"):
        if not (chunk := os.read(0, READ_BYTES)):
            os._exit(0)
        text += chunk
    modules = os.memfd_create("modules", 0)
    os.write(modules, text)
    again(modules, name, variables)


def again(modules: int, name: str, environment: Mapping[str, str]) -> NoReturn:
    """Become a keeper with this environment, but without what marks a process of a run."""
    own = {key: value for key, value in environment.items() if not key.startswith("HVDLAUNCH_") and key != "RANK"}
    words = [sys.executable, __file__, str(modules), name, " " * ROOM_BYTES]
    os.execve(sys.executable, words, {**own, ROOM: " " * ROOM_BYTES})  # noqa: S606


def keep(modules: int, name: str) -> dict[str, Any]:
    """Import the modules, and fork for requests; return in forks, each with its request."""
    os.environ.pop(ROOM, None)
    OOM.write_text("1000")  # if memory is short, this process is killed before any rank
    first = fixed(os.environ)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0{name}")
        server.listen(64)  # a request that comes now waits for the rest of the imports
        for module in os.pread(modules, READ_BYTES, 0).decode().split():
            importlib.import_module(module)
        if len(list(Path("/proc/self/task").iterdir())) > 1:
            os._exit(1)  # forks would lack that thread
        gc.collect()
        gc.freeze()
        request = serve(server, first)
    if "lifeline" not in request:
        again(modules, name, request["environment"])
    os.close(modules)
    return request


def serve(server: socket.socket, first: Mapping[str, str]) -> dict[str, Any]:
    """Fork for each request, and return in forks; also if another environment is requested while no fork lives.

    `first` are the fixed variables from before the imports: scikit-learn's sets some.
    """
    forks: dict[int, socket.socket] = {}
    wakes, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    try:
        while True:
            ready, _, _ = select.select([0, wakes, server.fileno()], [], [])
            if 0 in ready:
                os._exit(0)
            if wakes in ready:
                os.read(wakes, 64)
                for pid in list(forks):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        send_status(forks.pop(pid), os.waitstatus_to_exitcode(status))
            if server.fileno() in ready and (request := answer(server.accept()[0], forks, first)):
                return request
    finally:
        signal.set_wakeup_fd(-1)
        os.close(wakes)
        os.close(writer)


def answer(peer: socket.socket, forks: dict[int, socket.socket], first: Mapping[str, str]) -> dict[str, Any] | None:
    """Fork if this peer's request fits; return it in the fork, and if no fork lives because of its environment."""
    files: list[int] = []
    request: dict[str, Any] = {}
    peer.settimeout(PEER_S)
    with contextlib.suppress(OSError, ValueError, LookupError):
        request = received(peer, files)
        if fits(request, first):
            pid = os.fork()
            if pid == 0:
                for other in forks.values():
                    other.close()
                request["lifeline"] = files.pop()
                become_requester(request, files, peer)
                return request
            forks[pid] = peer
    for file in files:
        os.close(file)
    if peer not in forks.values():
        peer.close()
    is_other = not forks and "environment" in request and fixed(request["environment"]) != first
    return request if is_other else None


def received(peer: socket.socket, files: list[int]) -> dict[str, Any]:
    """Return a request, and add its standard streams and its lifeline to `files`; OSError for another user's."""
    credentials = peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    if struct.unpack("3i", credentials)[1] != os.getuid():
        raise PermissionError
    files += socket.recv_fds(peer, 1, 4, socket.MSG_CMSG_CLOEXEC)[1]
    with peer.makefile() as stream:
        return dict(json.loads(stream.readline(READ_BYTES)))


def fits(request: Mapping[str, Any], first: Mapping[str, str]) -> bool:
    """Return whether a fork would be what this program and these words start."""
    words = request["words"][1:3]
    is_plain = len(words) == 2 if words[0] == "-m" else words[0].endswith(".py") and words[0][0] != "-"
    return fixed(request["environment"]) == first and request["file"] == sys.executable and is_plain


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork has to share with the keeper."""
    return {name: value for name, value in environment.items() if name.startswith(FIXED)}


def send_status(peer: socket.socket, status: int) -> None:
    """Send the exit status of a fork, or minus the signal that has killed it, to the process that stands for it."""
    with contextlib.suppress(OSError), peer:
        peer.sendall(b"%d\n" % status)


def become_requester(request: Mapping[str, Any], files: list[int], peer: socket.socket) -> None:
    """Make this fork what the process is that has requested it; end if anything fails, or if that process is gone."""
    try:
        os.setsid() if request["in_session"] else os.setpgid(0, 0)
        for number, file in enumerate(files):
            os.dup2(file, number)
            os.close(file)
        sys.stdout.reconfigure(line_buffering=os.isatty(1))  # type: ignore[union-attr]
        # The kernel kills this process when the other end of its lifeline closes.
        lifeline = request["lifeline"]
        fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
        OOM.write_text(request["oom_score_adj"])
        os.chdir(request["folder"])
        os.umask(request["umask"])
        os.sched_setaffinity(0, request["cores"])
        for name, limits in request["limits"].items():
            resource.setrlimit(getattr(resource, name), limits)
        show(request["words"], request["environment"])
        with_imports = fixed(os.environ)
        os.environ.clear()
        os.environ.update({**with_imports, **request["environment"]})
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for number in request["ignored"]:
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])
        peer.sendall(b"%d\n" % os.getpid())
        if not peer.recv(1):
            raise ConnectionError
        peer.close()
    except BaseException:  # noqa: BLE001 (the process that stands for it starts the program by itself)
        os._exit(1)


def show(words: list[str], environment: Mapping[str, str]) -> None:
    """Show these words, and the variables of the run, where the kernel shows those of the keeper."""
    places = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[45:49]
    arguments, arguments_end, variables, variables_end = map(int, places)
    room = arguments_end - arguments - 1
    # Without a zero in the last byte the kernel shows the text up to the first zero.
    title = os.fsencode(" ".join(words))[: room - 1].ljust(room, b"\0") + b"."
    ctypes.memmove(arguments, title, len(title))
    at = ctypes.string_at(variables, variables_end - variables).find(f"{ROOM}={' ' * ROOM_BYTES}".encode())
    marks = [os.fsencode(f"{name}={value}") for name, value in environment.items() if name.startswith("HVDLAUNCH_")]
    marks.append(os.fsencode(f"RANK={environment.get('RANK', '')}"))
    shown = b"\0".join(mark[: ROOM_BYTES // 4] for mark in sorted(marks, key=len))
    if at >= 0:
        ctypes.memmove(variables + at, shown[:ROOM_BYTES].ljust(ROOM_BYTES, b"\0"), ROOM_BYTES)


def run(words: list[str], lifeline: int) -> NoReturn:
    """Run these words as `python` would, and end; the status is also sent from here, since the keeper may be gone."""
    end = os._exit

    def send_and_end(status: int) -> NoReturn:
        send(status)
        end(status)

    def send(status: object) -> None:
        with contextlib.suppress(OSError):
            os.write(lifeline, b"%d\n" % (status if isinstance(status, int) else status is not None))

    os._exit = send_and_end
    sys.orig_argv[:] = words
    is_module = words[1] == "-m"
    sys.argv = words[2:] if is_module else words[1:]
    if not sys.flags.safe_path:
        sys.path.insert(0, str(Path.cwd() if is_module else Path(words[1]).resolve().parent))
    try:
        if is_module:
            runpy.run_module(words[2], run_name="__main__", alter_sys=True)
        else:
            file = str(Path(words[1]).absolute())
            loader, main = SourceFileLoader("__main__", file), ModuleType("__main__")
            main.__file__, main.__loader__, sys.modules["__main__"] = file, loader, main
            exec(loader.source_to_code(loader.get_data(file), file), vars(main))  # noqa: S102
    except SystemExit as left:
        send(left.code)
        raise
    except Exception as error:  # noqa: BLE001
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename in (__file__, "<frozen runpy>"):
            trace = trace.tb_next
        sys.excepthook(type(error), error, trace)
        send(1)
        sys.exit(1)
    send(0)
    sys.exit(0)


if __name__ == "__main__":
    if not sys.flags.safe_path:
        del sys.path[0]  # this folder
    if len(sys.argv) == 3:
        begin(*sys.argv[1:])
    asked = keep(int(sys.argv[1]), sys.argv[2])
    run(asked["words"], asked["lifeline"])
