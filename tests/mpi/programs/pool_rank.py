"""One rank of a pool: runs the programs that it is told of, one after the other, in this process. argv: a socket.

Before each program and after it this process is as a new one in all that as_new() names. Besides it has no hvdtrain and
no tests imported: each program imports them anew, so that what one of them changes there does not reach the next one.
MPI lives as long as the process; Horovod is started by a program that needs it and ended behind it.

Threads that a program leaves stay: hvdtrain's for signals waits for what does not come any more, the one of its gauges
goes on reading. So do files that nobody closes, with the file systems that they are on.
"""

import contextlib
import faulthandler
import fcntl
import gc
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LAUNCHED = "OMPI_COMM_WORLD_RANK" in os.environ
RANK = int(os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)

if LAUNCHED:
    from mpi4py import MPI  # noqa: F401 (starts MPI, which then outlives Horovod)


@contextlib.contextmanager
def printing_to(file: Path) -> Iterator[None]:
    """Also what C prints; and the stacks of all threads at SIGQUIT or a crash."""
    kept = [os.dup(number) for number in (1, 2)]
    with file.open("w") as out:
        os.dup2(out.fileno(), 1)
        os.dup2(out.fileno(), 2)
        faulthandler.enable(2)
        faulthandler.register(signal.SIGQUIT, 2)
        try:
            yield
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            for number, before in enumerate(kept, start=1):
                os.dup2(before, number)
                os.close(before)


@contextlib.contextmanager
def as_new() -> Iterator[None]:
    """Environment, folder, arguments, import path, signals, timers, locks, Horovod, and torch's settings and seed.

    Not after a program that failed: the pool is killed then.
    """
    environment, folder, words, path = dict(os.environ), Path.cwd(), sys.argv, list(sys.path)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    yield
    faulthandler.cancel_dump_traceback_later()
    signal.set_wakeup_fd(-1)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    sys.excepthook = sys.__excepthook__
    end_horovod()
    reset_torch()
    release_locks()
    for name in [name for name in sys.modules if name.partition(".")[0] in ("hvdtrain", "tests")]:
        del sys.modules[name]
    sys.argv, sys.path[:] = words, path
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    gc.collect()


def end_horovod() -> None:
    """Raises RuntimeError where it could not be started again."""
    if "horovod.torch" in sys.modules:
        import horovod.torch as hvd

        if hvd.is_initialized():
            hvd.shutdown()
            # With a fusion threshold and a cycle time given once, its ParameterManager has no room for the defaults
            # that the next start gives it first, and that one crashes.
            if "HOROVOD_CYCLE_TIME" in os.environ:
                raise RuntimeError("a program that sets Horovod's cycle time needs an mpirun of its own")


def reset_torch() -> None:
    if "torch" in sys.modules:
        import torch

        torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        torch.set_grad_enabled(True)
        torch.seed()  # another one, as a new process has


def release_locks() -> None:
    """As the end of a process does: a run folder's is on a file that hvdtrain never closes."""
    for descriptor in list(Path("/proc/self/fd").iterdir()):
        with contextlib.suppress(OSError):
            fcntl.flock(int(descriptor.name), fcntl.LOCK_UN)


def run(words: list[str]) -> None:
    """As `python` would run these words; raises what the program does, and RuntimeError for a status that is not 0."""
    sys.argv = words[1:] if words[0] == "-m" else words
    try:
        if words[0] == "-m":
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        if end.code not in (None, 0):
            raise RuntimeError(f"ended with status {end.code}") from None


def failure_of(request: dict[str, Any]) -> str | None:
    """Run a program; its traceback, None where it ended well."""
    try:
        with printing_to(Path(request["prints"]) / f"rank-{RANK}"), as_new():
            os.chdir(request["cwd"])
            os.environ.update(request["environment"])
            run(request["words"])
    except BaseException:  # noqa: BLE001 (whatever it is, it is told)
        return traceback.format_exc()
    return None


def main() -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(sys.argv[1])
        with connection.makefile("rw") as stream:

            def tell(**facts: object) -> None:
                stream.write(json.dumps(facts) + "\n")
                stream.flush()

            tell(rank=RANK, pid=os.getpid())
            for line in stream:
                tell(failure=failure_of(json.loads(line)))


main()
