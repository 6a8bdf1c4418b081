"""How a rank ends: for bad input with status 2 and one line, otherwise with its last words on disk.

A rank that fails never waits for the others in MPI_Finalize: it exits at once, and the launcher ends the rest.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import active_children
from pathlib import Path
from types import TracebackType
from typing import NoReturn, TypeVar

from hvdtrain.safety.files import new_file

FINISHED = "finished"  # the exit reason of a run that has done all its epochs

FAILED = 1
BAD_INPUT = 2
TOO_MANY_SKIPPED = 3
REPLICAS_DIFFER = 4

FIRST_S = 10.0  # for the first process to say why: once one has ended, its launcher may end the others

T = TypeVar("T")

NEWCOMER = "_HVDTRAIN_NEWCOMER"  # the number of a rank that joins a run
RANK_VARIABLES = (NEWCOMER, "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK")


_leads = False  # this rank has taken the place of rank 0
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # ask a rank to end
_WORKERS_S = 1.0  # the time of loader workers to end
_SAME_S = 0.3  # within this time two signals are one: timeout(1) sends it to its program, then to the whole group
_REPORTING = threading.Lock()  # another thread reports checkpoints


class BadInput(Exception):  # noqa: N818 (named after what the user gave)
    """Input or settings that cannot work; the message is one line that names the field, the value and the remedy."""


class EndOfRun(Exception):  # noqa: N818 (ends a run, on all ranks together)
    """A reason to stop that all ranks have agreed on; the message is one line."""

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # for result.json


def launched_rank() -> int:
    """The rank of this process, from its launcher's environment, before MPI has started; 0 without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def _at_once(status: int) -> NoReturn:
    """End this process, without MPI_Finalize."""
    os._exit(status)


def _flushed(status: int) -> NoReturn:
    sys.stdout.flush()
    sys.stderr.flush()
    _at_once(status)


_end: Callable[[int], NoReturn] = _at_once
_leave: Callable[[int], NoReturn] = sys.exit


def kill(_: int) -> NoReturn:
    """End this process by a signal: of a status mpirun does not tell the ranks that are left, or it ends them, too."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def never_finalize() -> None:
    """From now on this process ends without MPI_Finalize, which may wait for ranks that are lost."""
    global _leave  # noqa: PLW0603
    _leave = kill if NEWCOMER in os.environ else _flushed


def lead() -> None:
    """Tell from now on what rank 0 has told, which is lost."""
    global _leads  # noqa: PLW0603 (as all here, of the process)
    _leads = True
    be_shown()


def be_shown() -> None:
    """Have hvdlaunch, which shows rank 0 alone, show from now on what this process says."""
    if path := os.environ.get("HVDLAUNCH_SHOW"):
        with contextlib.suppress(OSError):  # without the file it stands in the rank's log
            Path(path).touch()


def end_by(end: Callable[[int], NoReturn]) -> None:
    """From now on a failure, and a signal to end, ends this process so."""
    global _end  # noqa: PLW0603
    _end = end


def end_by_signal() -> None:
    """From now on this process, a newcomer, ends by a signal, whatever it ends of."""
    end_by(kill)
    never_finalize()
    sys.excepthook = _leave_with_traceback(None, lambda _: None)


def report(**facts: str) -> None:
    """Report facts to hvdlaunch, if it has started this run.

    `run_folder`; `saves`, once every rank takes a checkpoint at SIGUSR1; `checkpoint`, the step of the newest one;
    `said`, the line that explains the end of the run; `exit_reason`.
    """
    if path := os.environ.get("HVDLAUNCH_REPORT"):
        with _REPORTING, contextlib.suppress(OSError):  # this host may not share the folder
            known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
            with new_file(Path(f"{path}.part")) as file:
                file.write(json.dumps({**known, **facts}).encode())
            Path(f"{path}.part").replace(path)


def say(error: BadInput | EndOfRun) -> None:
    """Print the one line of an error, and report it."""
    line = f"hvdtrain: {' '.join(str(error).split())}"
    be_shown()
    print(line, file=sys.stderr, flush=True)
    report(said=line)


def run(main: Callable[[], None]) -> NoReturn:
    """Run one rank's `main` and end the process: status 0, or as `attempt` ends it."""
    attempt(main)
    _ignore_requests_to_leave()
    _end_workers()
    _leave(0)


def attempt(part: Callable[[], T]) -> T:
    """What a part of one rank's program returns; else the process ends: status 2 for BadInput, EndOfRun's own or 1."""
    sys.excepthook = _leave_with_traceback(None, lambda _: None)
    try:
        return part()
    except (BadInput, EndOfRun) as error:
        _ignore_requests_to_leave()
        _end_workers()
        if launched_rank() == 0 or _leads or (isinstance(error, BadInput) and NEWCOMER in os.environ):
            say(error)
        # MPI_Finalize, on the way out, waits for rank 0, so no other rank's status ends the job before its line is out.
        _leave(error.status if isinstance(error, EndOfRun) else BAD_INPUT)


def _ignore_requests_to_leave() -> None:
    """Ignore SIGUSR1: Python resets any other handler to the default, which kills, before the process has ended."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_workers() -> None:
    """Have loader workers killed that do not end by themselves: they block SIGTERM, and one may be stuck in read()."""
    workers = active_children()

    def kill_all() -> None:
        for worker in workers:
            worker.kill()

    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises when one is killed
        limit = threading.Timer(_WORKERS_S, kill_all)
        limit.daemon = True
        limit.start()


def on_early_end(
    error_file: Path, before_leaving: Callable[[str], None], *, step: Callable[[], int | None]
) -> threading.Event:
    """From now on write the traceback of a failure, and the stacks of a crash, to `error_file` too.

    SIGUSR1 and a first SIGINT set the event that is returned: save and leave. So does a first SIGTERM without a
    launcher; mpirun leaves a rank only about one second between SIGTERM and SIGKILL. One that comes again
    within 0.3 s is passed over. Any other of these signals and any failure call `before_leaving` with 'failed',
    'interrupted' or 'terminated' and end the process, with status 128 + signal or 1. Signals are handled on a thread of
    their own, since the main thread may be waiting for a rank that is already gone. `step` returns the current step.
    """
    sys.excepthook = _leave_with_traceback(error_file, before_leaving, step)
    faulthandler.enable(error_file.open("w"), all_threads=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in STOPS:
        signal.signal(number, lambda *_: None)  # the wake-up file descriptor needs a handler, not the default
    leave = threading.Event()
    alone = not any(name in os.environ for name in RANK_VARIABLES)

    def watch() -> None:
        interrupted, last, until = False, 0, 0.0
        while True:
            number = os.read(reader, 1)[0]
            if number not in STOPS:  # others wake it up too: torch's loaders handle SIGCHLD
                continue
            if number == last and time.monotonic() < until:
                continue
            last, until = number, time.monotonic() + _SAME_S
            first = not leave.is_set()
            if number == signal.SIGUSR1 or (first and (alone or number == signal.SIGINT)):
                interrupted |= number == signal.SIGINT
                leave.set()
                continue
            interrupted |= number == signal.SIGINT
            _try(before_leaving, "interrupted" if interrupted else "terminated")
            _end(128 + (signal.SIGINT if interrupted else number))

    threading.Thread(target=watch, name="stop-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # launch.rank.bind has blocked it until now
    return leave


def _try(before_leaving: Callable[[str], None], reason: str) -> None:
    try:
        before_leaving(reason)
    except Exception:  # noqa: BLE001
        traceback.print_exc()  # and leave anyway


def _leave_with_traceback(
    error_file: Path | None, before_leaving: Callable[[str], None], step: Callable[[], int | None] | None = None
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            _end(128 + signal.SIGINT)
        stack = "".join(traceback.format_exception(kind, error, trace))
        at = "" if step is None else f" at step {step()}" if step() is not None else " before the first step"
        reason = " ".join(f"{kind.__name__}: {error}".split())
        message = f"hvdtrain: rank {launched_rank()} on {socket.gethostname()} failed{at}: {reason}\n{stack}"
        if error_file is not None:
            with contextlib.suppress(OSError):
                error_file.write_text(message)
        if _end is kill:  # the others go on, and nobody else tells why this one does not
            be_shown()
        print(message, file=sys.stderr, flush=True)
        _try(before_leaving, "failed")
        sys.stdout.flush()
        _end(FAILED)

    return hook
