"""Ranks of tests start as forks of this process, which has already imported torch, Horovod and the programs.

A fork costs a few hundredths of a second of a core where the imports cost 2 s. The process that a launcher has started
(sitecustomize.py) stands for it: the fork has its words, environment, folder, cores, limits, signals and files, it ends
as the fork ends, and the fork is dead as soon as it is. MPI and Horovod start in the fork. What is about the order of
imports, about memory, processes or a terminal has to start by itself.

    python forkserver.py DESCRIPTOR     of a listening socket; until its standard input ends
"""

import atexit
import contextlib
import fcntl
import gc
import importlib
import json
import os
import resource
import runpy
import selectors
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

PROGRAMS = ("hvdtrain.effnet", "hvdtrain.bert", "hvdtrain.bandwidth")
FIXED = ("PYTHON", "OMP_", "MKL_")
# What they import once the ranks have agreed on their settings.
LATE = (
    *("hvdtrain.program.job", "hvdtrain.program.start", "hvdtrain.program.training"),
    *("hvdtrain.recipe.sync_batch_norm", "hvdtrain.replica.parts", "hvdtrain.stages.layout", "hvdtrain.sync.rounds"),
    *("hvdtrain.witnesses.find_nan", "torch.utils.serialization"),
    *("hvdtrain.vision.data", "hvdtrain.vision.models", "hvdtrain.vision.task"),
    *("hvdtrain.text.data", "hvdtrain.text.export", "hvdtrain.text.model", "hvdtrain.text.pretrained"),
    *("hvdtrain.text.task", "hvdtrain.text.weights", "sklearn.datasets", "torch.utils.tensorboard"),
)


def serve(listening: int) -> dict[str, Any]:
    """Fork for each request; returns in the forks alone, with what they were asked for."""
    children: dict[int, socket.socket] = {}
    mine = fixed(os.environ)
    waker, wakes = socket.socketpair()
    for end in (waker, wakes):
        end.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    with selectors.DefaultSelector() as selector, socket.socket(fileno=listening) as server:
        for source in (server, waker, sys.stdin):
            selector.register(source, selectors.EVENT_READ)
        while True:
            ready = [key.fileobj for key, _ in selector.select()]
            if sys.stdin in ready:
                os._exit(0)
            if waker in ready:
                with contextlib.suppress(BlockingIOError):
                    waker.recv(1024)
            while (ended := reaped()) is not None:
                pid, status = ended
                with children.pop(pid) as connection:
                    answer(connection, status)
            if server in ready:
                connection = server.accept()[0]
                request, descriptors = received(connection)
                pid = os.fork() if fixed(request["environment"]) == mine else None
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for one in (waker, wakes, *children.values()):
                        one.close()
                    connection.close()
                    take_over(request, descriptors)
                    return request
                for one in descriptors:
                    os.close(one)
                answer(connection, pid)
                if pid is None:
                    connection.close()
                else:
                    children[pid] = connection


def fixed(environment: Mapping[str, str]) -> dict[str, str]:
    """What is read when Python or a library starts."""
    return {name: value for name, value in environment.items() if name.startswith(FIXED)}


def answer(connection: socket.socket, value: int | None) -> None:
    with contextlib.suppress(ConnectionError):
        connection.sendall(json.dumps(value).encode() + b"\n")


def reaped() -> tuple[int, int] | None:
    """The next child that has ended: its process id, and its exit status or minus its signal."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, os.waitstatus_to_exitcode(status)) if pid else None


def received(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """One request: the descriptors 0 to 2 of the process it is for, and its lifeline; then a line of JSON."""
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 4)
    with connection.makefile() as stream:
        return json.loads(stream.readline()), descriptors


def take_over(request: dict[str, Any], descriptors: list[int]) -> None:
    """Make this fork what the process that has asked for it is."""
    os.setsid()
    *files, lifeline = descriptors
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    # The kernel kills this process when the other end of its lifeline closes.
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
    os.chdir(request["cwd"])
    os.umask(request["umask"])
    os.sched_setaffinity(0, request["cores"])
    for name, limits in request["limits"].items():
        resource.setrlimit(getattr(resource, name), limits)
    os.environ.clear()
    os.environ.update(request["environment"])
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_SETMASK, request["blocked"])


def run(words: list[str]) -> int:
    """As `python` would run these words; the exit status."""
    sys.orig_argv[1:] = words
    if words[0] == "-P":
        words = words[1:]
    else:
        sys.path.insert(0, str(Path.cwd() if words[0] == "-m" else Path(words[0]).parent))
    sys.argv = words[1:] if words[0] == "-m" else words
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if not isinstance(end.code, int | None):
            raise
        return end.code or 0
    return 0


def leave(status: int) -> NoReturn:
    """As multiprocessing's forks do: to free what it has inherited takes a process longer than to start."""
    threading._shutdown()
    atexit._run_exitfuncs()
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    for name in ("horovod.torch", *PROGRAMS, *LATE):
        importlib.import_module(name)
    for name in PROGRAMS:
        del sys.modules[name]  # each is a __main__
    gc.collect()
    gc.freeze()
    leave(run(serve(int(sys.argv[1]))["words"]))
