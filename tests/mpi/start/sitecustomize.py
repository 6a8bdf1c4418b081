"""Python imports this first in each process of a launcher: a rank becomes the stand-in of a fork of forkserver.py."""

import contextlib
import json
import os
import re
import resource
import signal
import socket
import sys
from typing import IO, Any, NoReturn

# Stand-ins for a training start without torch faster than they fork.
STAND_INS = "place|steps|leave_result|wait_unasked"
FORKED = re.compile(rf"(-P )?-m hvdtrain\.(effnet|bert|bandwidth) |\S*/(programs|examples)/(?!{STAND_INS})\w+\.py ")
FORWARDED = [getattr(signal, f"SIG{name}") for name in ("HUP", "INT", "QUIT", "TERM", "USR1", "USR2", "CONT")]


def stand_in(address: str, words: list[str]) -> None:
    """Be the process of a fork: pass signals on, end as it ends. Returns where the server forks none."""
    blocked = signal.pthread_sigmask(signal.SIG_SETMASK, signal.valid_signals())
    known = {number: signal.getsignal(number) for number in FORWARDED}
    umask = os.umask(0)
    os.umask(umask)
    request = {
        "words": words,
        "environment": dict(os.environ),
        "cwd": os.getcwd(),  # noqa: PTH109 (pathlib is not imported yet)
        "umask": umask,
        "cores": list(os.sched_getaffinity(0)),
        "limits": {name: resource.getrlimit(getattr(resource, name)) for name in dir(resource) if "RLIMIT_" in name},
        "blocked": [*blocked, signal.SIGUSR1],  # this process handles it at once, the fork later
        "ignored": [number for number, handler in known.items() if handler == signal.SIG_IGN],
    }
    lifeline, its_end = socket.socketpair()
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        socket.send_fds(server, [b"\n"], [0, 1, 2, its_end.fileno()])
        its_end.close()
        server.sendall(json.dumps(request).encode() + b"\n")
        answers = server.makefile()
        pid = heard(answers)
        if pid is not None:
            for number, handler in known.items():
                if handler != signal.SIG_IGN:
                    signal.signal(number, lambda number, _: pass_on(pid, number))
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            end_as(heard(answers))
    lifeline.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def heard(answers: IO[str]) -> Any:
    """The next answer; without the server, whose pytest has been killed, this process ends, and with it its fork."""
    line = answers.readline()
    if not line:
        end_as(1)
    return json.loads(line)


def pass_on(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_as(status: int) -> NoReturn:
    """With an exit status, or minus the signal that it died of."""
    if status < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


if os.environ.get("TESTS_FORKSERVER") and FORKED.match(" ".join([*sys.orig_argv[1:], ""])):
    stand_in(os.environ["TESTS_FORKSERVER"], sys.orig_argv[1:])
