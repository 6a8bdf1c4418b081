"""How a rank ends: bad input gives status 2 and one line; any other failure leaves its traceback on disk.

A rank that fails never waits for the others in MPI_Finalize: it exits immediately, and the launcher ends the rest.
"""

import contextlib
import errno
import faulthandler
import json
import logging
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
from typing import Literal, NoReturn, TypeVar

from hvdtrain.settings.safety import output
from hvdtrain.settings.safety.errors import BadInput as BadInput  # noqa: PLC0414 (raised with what ends a rank)
from hvdtrain.settings.safety.errors import EndOfRun as EndOfRun  # noqa: PLC0414
from hvdtrain.settings.safety.files import read_file, write_atomically

FINISHED = "finished"  # exit reason of a run that has completed all epochs

FAILED = 1
BAD_INPUT = 2
TOO_MANY_SKIPPED = 3
REPLICAS_DIFFER = 4

FIRST_ERROR_S = 10.0  # for the first process to report why: once one has ended, its launcher may end the others

T = TypeVar("T")

Severity = Literal["error", "warning", "note"]

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK")
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # signals that request the end of a rank
_WORKER_EXIT_S = 1.0  # time for loader workers to end
_DUPLICATE_S = 0.3  # within this time equal signals count once: timeout(1) signals the program, then the group
_RANK_0_S = 2.0
_REPORT_LOCK = threading.Lock()  # checkpoints are reported from another thread


def launched_rank() -> int:
    """Return this process's rank from its launcher's environment, before MPI has started; 0 without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def _exit_now(status: int) -> NoReturn:
    """End this process, without MPI_Finalize."""
    os._exit(status)


def report(**facts: str) -> None:
    """Report facts to hvdlaunch, if it has started this run.

    The facts are `run_folder`; `is_shared`, whether all hosts see it; `saves`, once every rank takes a checkpoint at
    SIGUSR1; `checkpoint` and `snapshot`, the steps of the newest ones; `said`, the line that explains the end of the
    run; `exit_reason`; `doing`, what the run does now.
    """
    if path := os.environ.get("HVDLAUNCH_REPORT"):
        with _REPORT_LOCK, contextlib.suppress(OSError):  # this host may not share the folder
            known = _known_facts(Path(path))
            write_atomically(Path(path), json.dumps({**known, **facts}).encode())


def _known_facts(file: Path) -> dict[str, str]:
    with contextlib.suppress(OSError, ValueError, TypeError, RecursionError):  # the first facts, or not ours
        return dict(json.loads(read_file(file)))
    return {}


def message_line(severity: Severity, text: str) -> str:
    """Format a one-line message: an error ends the run, a warning needs attention, a note explains."""
    return f"hvdtrain: {severity}: {' '.join(text.split())}"


def print_message(severity: Severity, text: str, *, what: str = output.ERR) -> None:
    """Print a message, from any thread; a note or a warning by the logger `hvdtrain`."""
    if severity == "error":
        output.print_line(message_line(severity, text), what=what)
    else:
        level = logging.WARNING if severity == "warning" else logging.INFO
        LOGGER.log(level, " ".join(text.split()), stacklevel=2, extra={"what": what})


class _Printer(logging.Handler):
    """Prints a note or a warning as a line, unless the program has a handler of its own."""

    def emit(self, record: logging.LogRecord) -> None:
        if LOGGER.handlers == [self] and not logging.root.handlers:
            severity: Severity = "warning" if record.levelno >= logging.WARNING else "note"
            what = getattr(record, "what", output.ERR)
            output.print_line(message_line(severity, record.getMessage()), what=what)


LOGGER = logging.getLogger("hvdtrain")
LOGGER.setLevel(logging.INFO)
LOGGER.addHandler(_Printer())


def print_answer(text: str) -> None:
    """Print an answer; if it cannot be written, end this process with status 1, silently if the reader has left."""
    if (reason := output.print_line(text)) is not None:
        if not reason.endswith(os.strerror(errno.EPIPE)):
            print_message("error", reason)
        with contextlib.suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the end
        sys.exit(FAILED)


def print_error(error: BadInput | EndOfRun) -> None:
    """Print why this process ends, and report it; with status 0 it is not an error."""
    severity: Severity = "note" if isinstance(error, EndOfRun) and error.status == 0 else "error"
    output.end_drawing()
    print_message(severity, str(error))
    report(said=message_line(severity, str(error)))


def leave_training(rank: int, error: BadInput) -> NoReturn:
    """Print the error and end this rank at once: the others may not have met it, and wait for it.

    Another rank first leaves rank 0 time to end the job with an error that all ranks have met.
    """
    _ignore_stop_requests()
    if rank == 0:
        print_error(error)
    else:
        time.sleep(_RANK_0_S)
        print_message("error", f"rank {rank} on {socket.gethostname()}: {error}")
    output.flush()
    _exit_now(BAD_INPUT)


def run(main: Callable[[], None]) -> NoReturn:
    """Run one rank's `main` and end the process: status 0, or as in `call_or_exit`."""
    output.guard_streams()
    call_or_exit(main)
    output.end_drawing()
    _ignore_stop_requests()
    _end_workers()
    sys.exit(0)


def call_or_exit(function: Callable[[], T]) -> T:
    """Return the function's result; if it raises, end the process: status 2 for BadInput, EndOfRun's status, or 1."""
    sys.excepthook = _exception_hook(None, lambda _: None)
    try:
        return function()
    except (BadInput, EndOfRun) as error:
        try:
            _ignore_stop_requests()
            _end_workers()
            if launched_rank() == 0:
                print_error(error)
        finally:
            # MPI_Finalize at exit waits for rank 0, so the status of another rank does not end the job before rank 0's
            # message.
            sys.exit(error.status if isinstance(error, EndOfRun) else BAD_INPUT)


def _ignore_stop_requests() -> None:
    """Ignore SIGUSR1: Python resets any other handler to the default, which kills, before the process has ended."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def _end_workers() -> None:
    """Kill loader workers that do not end by themselves: they block SIGTERM, and may be stuck in read()."""
    workers = active_children()

    def kill_all() -> None:
        for worker in workers:
            worker.kill()

    if workers:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises if a worker is killed
        limit = threading.Timer(_WORKER_EXIT_S, kill_all)
        limit.daemon = True
        limit.start()


def install_stop_handlers(
    error_file: Path, before_leaving: Callable[[str], None], *, step: Callable[[], int | None]
) -> threading.Event:
    """From now on, write tracebacks of failures and stacks of crashes to `error_file` as well.

    SIGUSR1 and a first SIGINT set the returned event: save and stop. So does a first SIGTERM without a launcher; mpirun
    leaves a rank only about one second between SIGTERM and SIGKILL. A repeated signal within 0.3 s is ignored. Any
    other of these signals, and any failure, call `before_leaving` with 'failed', 'interrupted' or 'terminated' and end
    the process with status 128 + signal or 1. Signals are handled on a separate thread, since the main thread may be
    waiting for a rank that is already gone. `step` returns the current step.
    """
    sys.excepthook = _exception_hook(error_file, before_leaving, step)
    faulthandler.enable(error_file.open("w"), all_threads=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)  # the wake-up file descriptor requires a handler other than the default
    stop_requested = threading.Event()
    has_no_launcher = not any(name in os.environ for name in RANK_VARIABLES)

    def watch() -> None:
        is_interrupted, last_number, until_s = False, 0, 0.0
        while True:
            number = os.read(reader, 1)[0]
            if number not in STOP_SIGNALS:  # others wake it up too: torch's loaders handle SIGCHLD
                continue
            if number == last_number and time.monotonic() < until_s:
                continue
            last_number, until_s = number, time.monotonic() + _DUPLICATE_S
            is_first = not stop_requested.is_set()
            if number == signal.SIGUSR1 or (is_first and (has_no_launcher or number == signal.SIGINT)):
                is_interrupted |= number == signal.SIGINT
                stop_requested.set()
                continue
            is_interrupted |= number == signal.SIGINT
            try:
                _call_safely(before_leaving, "interrupted" if is_interrupted else "terminated")
            finally:
                output.end_drawing()
                _exit_now(128 + (signal.SIGINT if is_interrupted else number))

    threading.Thread(target=watch, name="stop-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # whoever started this may block it
    return stop_requested


def _call_safely(before_leaving: Callable[[str], None], reason: str) -> None:
    try:
        before_leaving(reason)
    except Exception:  # noqa: BLE001
        output.print_line(traceback.format_exc(), what=output.ERR)  # and exit anyway


def _exception_hook(
    error_file: Path | None, before_leaving: Callable[[str], None], step: Callable[[], int | None] | None = None
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        is_interrupted = issubclass(kind, KeyboardInterrupt)
        try:
            message = "" if is_interrupted else _format_failure(kind, error, trace, step)
            if error_file is not None and message:
                with contextlib.suppress(OSError):
                    error_file.write_bytes(message.encode(errors="backslashreplace"))
            _call_safely(before_leaving, "interrupted" if is_interrupted else "failed")
            output.end_drawing()
            if message:
                output.print_line(message, what=output.ERR)
            output.flush()
        finally:
            _exit_now(128 + signal.SIGINT if is_interrupted else FAILED)

    return hook


def _format_failure(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    step: Callable[[], int | None] | None,
) -> str:
    when = "" if step is None else f" at step {step()}" if step() is not None else " before the first step"
    try:
        reason = f"{kind.__name__}: {error}"
    except Exception:  # noqa: BLE001 (of its own __str__)
        reason = kind.__name__
    failure = f"rank {launched_rank()} on {socket.gethostname()} failed{when}: {reason}"
    stack = "".join(traceback.format_exception(kind, error, trace))
    return f"{message_line('error', failure)}\n{stack}"
