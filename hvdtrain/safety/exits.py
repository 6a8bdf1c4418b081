"""How a rank ends: with status 2 and one line for bad input, else with its last words on disk.

A rank that fails never waits for the others in MPI_Finalize: it leaves at once, and the launcher ends the rest.
"""

import contextlib
import faulthandler
import json
import os
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import NoReturn

FINISHED = "finished"  # the exit reason of a run that has done all its epochs

FAILED = 1
BAD_INPUT = 2
TOO_MANY_SKIPPED = 3
REPLICAS_DIFFER = 4

RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "HOROVOD_RANK")


_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
_REPORTING = threading.Lock()  # checkpoints are reported from a thread of their own


class BadInput(Exception):  # noqa: N818 (the name is what the user gave, not what we did)
    """Input or settings that cannot work; the message is one line that names the field, the value and the remedy."""


class EndOfRun(Exception):  # noqa: N818 (ends a run, on all ranks together)
    """A reason to stop that all ranks have agreed on; the message is one line."""

    def __init__(self, message: str, *, status: int, reason: str) -> None:
        super().__init__(message)
        self.status = status
        self.reason = reason  # for result.json


def launched_rank() -> int:
    """This process's rank by its launcher's environment, before MPI is up; 0 without a launcher."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def report(**facts: str) -> None:
    """Leave facts for hvdlaunch, if that has started this run.

    `run_folder`; `saves`, once every rank leaves a checkpoint at SIGUSR1; `checkpoint`, the newest one's step; `said`,
    the line that explains its end; `exit_reason`.
    """
    if path := os.environ.get("HVDLAUNCH_REPORT"):
        with _REPORTING, contextlib.suppress(OSError):  # a folder that this host does not share
            known = json.loads(Path(path).read_text()) if Path(path).exists() else {}
            Path(f"{path}.part").write_text(json.dumps({**known, **facts}))
            Path(f"{path}.part").replace(path)


def run(main: Callable[[], None]) -> NoReturn:
    """Run one rank's `main` and end the process: status 0, 2 for BadInput, EndOfRun's own, 1 for anything else."""
    sys.excepthook = _leave_with_traceback(None, lambda _: None)
    try:
        main()
        _no_more_asking()
    except (BadInput, EndOfRun) as error:
        _no_more_asking()
        if launched_rank() == 0:
            line = f"hvdtrain: {' '.join(str(error).split())}"
            print(line, file=sys.stderr, flush=True)
            report(said=line)
        # MPI_Finalize, on the way out, waits for rank 0, so that nobody's status ends the job before its line is out.
        sys.exit(error.status if isinstance(error, EndOfRun) else BAD_INPUT)
    sys.exit(0)


def _no_more_asking() -> None:
    """Python gives SIGUSR1 back its default, to kill, before the process has quite ended: ignored, it stays so."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)


def on_early_end(
    error_file: Path, before_leaving: Callable[[str], None], *, step: Callable[[], int | None]
) -> threading.Event:
    """From now on a failing rank also writes its traceback, and a crash its stacks, to `error_file`.

    SIGUSR1 and a first SIGINT set the event that is returned: save and leave; so does a first SIGTERM without a
    launcher, for mpirun gives a rank only about one second between SIGTERM and SIGKILL. At any other of these signals,
    and at a failure, `before_leaving` is called with 'failed', 'interrupted' or 'terminated', and the process ends,
    with 128 + signal or 1. For a signal that is on a thread of its own, since the main thread may be waiting for a rank
    that is gone already. `step` tells the step at hand.
    """
    sys.excepthook = _leave_with_traceback(error_file, before_leaving, step)
    faulthandler.enable(error_file.open("w"), all_threads=True)
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    for number in _STOPS:
        signal.signal(number, lambda *_: None)  # the wake-up needs a handler in place of the default
    leave = threading.Event()
    alone = not any(name in os.environ for name in RANK_VARIABLES)

    def watch() -> None:
        interrupted = False
        while True:
            number = os.read(reader, 1)[0]
            if number not in _STOPS:  # others are written there as well, as SIGCHLD by torch's loaders
                continue
            first = not leave.is_set()
            if number == signal.SIGUSR1 or (first and (alone or number == signal.SIGINT)):
                interrupted |= number == signal.SIGINT
                leave.set()
                continue
            interrupted |= number == signal.SIGINT
            _try(before_leaving, "interrupted" if interrupted else "terminated")
            os._exit(128 + (signal.SIGINT if interrupted else number))

    threading.Thread(target=watch, name="stop-signals", daemon=True).start()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})  # launch.rank.bind has blocked it until now
    return leave


def _try(before_leaving: Callable[[str], None], reason: str) -> None:
    try:
        before_leaving(reason)
    except Exception:  # noqa: BLE001
        traceback.print_exc()  # and leave all the same


def _leave_with_traceback(
    error_file: Path | None, before_leaving: Callable[[str], None], step: Callable[[], int | None] | None = None
) -> Callable[[type[BaseException], BaseException, TracebackType | None], None]:
    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, KeyboardInterrupt):
            os._exit(128 + signal.SIGINT)
        story = "".join(traceback.format_exception(kind, error, trace))
        at = "" if step is None else f" at step {step()}" if step() is not None else " before the first step"
        what = " ".join(f"{kind.__name__}: {error}".split())
        words = f"hvdtrain: rank {launched_rank()} on {socket.gethostname()} failed{at}: {what}\n{story}"
        if error_file is not None:
            with contextlib.suppress(OSError):
                error_file.write_text(words)
        print(words, file=sys.stderr, flush=True)
        _try(before_leaving, "failed")
        sys.stdout.flush()
        os._exit(FAILED)

    return hook
