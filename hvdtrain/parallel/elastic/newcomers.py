"""Newcomers, which replace lost ranks: they start, import and load while the other ranks train.

The lowest rank starts them through MPI, on the hosts of the lost ranks, and continues. When they have reported that
they are ready, all ranks admit them at the end of a step. If none can be started, for example while a host does not
respond, the lowest rank tries again.
"""

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import psutil

from hvdtrain.parallel.elastic import start
from hvdtrain.ranks import connect
from hvdtrain.settings.launched import VARIABLE, fact
from hvdtrain.settings.safety import exits
from hvdtrain.settings.safety.exits import NEWCOMER
from hvdtrain.settings.safety.files import read_file

INVITATION = "_HVDTRAIN_INVITATION"  # variable in a newcomer's environment: Invitation as JSON

# Limit from the start of a newcomer to its ready message: imports and data take 4 to 6 s on two busy cores.
LIMIT_S = 300.0
LEAST_PAUSE_S, MOST_PAUSE_S = 5.0, 300.0  # after a failed attempt; doubles each time
_LOOK_EVERY_S = 0.02
_READY, _GO = 1, 2  # tags of messages

# Variables that MPI's launcher sets for a single process; parameters of Open MPI are for all.
_OF_PROCESS = re.compile(r"OMPI_(?!MCA_)|PMIX_|PRTE_|PMI_")


@dataclass(frozen=True, kw_only=True)
class Invitation:
    """The facts that a newcomer needs before it is connected."""

    number: int  # its number: no rank of the run has had it
    place: int  # the rank that was lost
    hosts: list[str]  # by place
    run: str  # the folder
    facts: dict[str, Any]  # must be equal on all ranks
    parent_pid: int  # the process on this host that has invited it


def read_invitation(environment: Mapping[str, str]) -> Invitation | None:
    """Return this process's invitation, if it is a newcomer."""
    text = environment.get(INVITATION)
    return None if text is None else Invitation(**json.loads(text))


def make_command(invitation: Invitation, environment: Mapping[str, str]) -> list[str]:
    """Return the command for a newcomer: this rank's program and environment, passed through a file in the run folder.

    Under hvdlaunch, the `place` in HVDLAUNCH_RANK determines how it is bound.
    """
    import torch

    variables = {name: value for name, value in environment.items() if not _OF_PROCESS.match(name)}
    variables |= {
        INVITATION: json.dumps(asdict(invitation)),
        NEWCOMER: str(invitation.number),
        "_HVDTRAIN_MPI_FIRST": "1",
        VARIABLE: json.dumps({**json.loads(environment.get(VARIABLE, "{}")), "place": invitation.place}),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }
    command = fact(environment, "command", list[str]()) or sys.orig_argv
    file = Path(invitation.run) / f"newcomer-{invitation.number}.json"
    file.write_text(json.dumps({"program": command, "environment": variables, "folder": str(Path.cwd())}))
    return [sys.executable, "-P", start.__file__, str(file)]


class Newcomers:
    """The newcomers that the lowest rank has invited, one group at a time."""

    def __init__(self, loss_errors: tuple[type[Exception], ...]) -> None:
        """Prepare to invite; `loss_errors` are MPI's exceptions."""
        self.ready = threading.Event()
        self._failures: tuple[type[Exception], ...] = (*loss_errors, TimeoutError, OSError)
        self._missing: Callable[[], Sequence[Invitation]] = tuple
        self._wanted = threading.Event()
        self._thread: threading.Thread | None = None
        self._bridge: Any = None  # MPI's communicator to them
        self._count = 0

    def invite(self, missing: Callable[[], Sequence[Invitation]]) -> None:
        """Invite newcomers for the ranks that `missing` returns, unless some are already starting."""
        self._missing = missing
        self._wanted.set()
        if self._thread is None:
            self._thread = threading.Thread(target=self._keep_inviting, name="newcomers", daemon=True)
            self._thread.start()

    def send_port(self) -> str:
        """Admit the newcomers that are ready: send and return the port at which they join."""
        self.ready.clear()
        port = connect.open_port()
        for newcomer in range(self._count):
            self._bridge.send(port, newcomer, tag=_GO)
        self._bridge.Free()
        return port

    def _keep_inviting(self) -> None:
        pause_s = LEAST_PAUSE_S
        while self._wanted.wait():
            self._wanted.clear()
            invitations = self._missing()
            if not invitations or self.ready.is_set():
                continue
            places = ", ".join(str(invitation.place) for invitation in invitations)
            try:
                self._start(invitations)
                pause_s = LEAST_PAUSE_S
            except self._failures as error:
                exits.print_message(
                    "warning", f"no replacement for rank {places} yet ({error}); retrying in {pause_s:.0f} s"
                )
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, MOST_PAUSE_S)
                self._wanted.set()

    def _start(self, invitations: Sequence[Invitation]) -> None:
        programs = [make_command(invitation, os.environ) for invitation in invitations]
        files = [Path(command[-1]) for command in programs]
        bridge = connect.start_newcomers(programs, [invitation.hosts[invitation.place] for invitation in invitations])
        deadline_s = time.monotonic() + LIMIT_S
        for newcomer in range(len(invitations)):
            while not bridge.Iprobe(newcomer, _READY):
                processes = [_process_of(file) for file in files]
                if not all(processes) or time.monotonic() > deadline_s:
                    for process in filter(None, processes):  # others may be waiting
                        with contextlib.suppress(psutil.NoSuchProcess):
                            process.kill()
                    raise TimeoutError(f"one of {len(files)} processes ended, or was not ready within {LIMIT_S:.0f} s")
                time.sleep(_LOOK_EVERY_S)
            bridge.recv(source=newcomer, tag=_READY)
        for file in files:
            file.unlink()
        self._bridge, self._count = bridge, len(invitations)
        self.ready.set()


def _process_of(file: Path) -> psutil.Process | None:
    """Return the living newcomer whose process id is in the file; Open MPI 5.0.11 does not report that it has ended."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(int(read_file(file)))
        return None if process.status() == psutil.STATUS_ZOMBIE else process
    return None


def wait_to_join(loss_errors: tuple[type[Exception], ...], parent_pid: int) -> str:
    """Report to the inviting process that this newcomer is ready, and wait for the port at which it joins.

    Ends when that process ends, for example at the end of the run.
    """
    is_admitted = threading.Event()
    threading.Thread(target=_exit_with_parent, args=(parent_pid, is_admitted), name="invited", daemon=True).start()
    bridge = connect.parent_comm()
    try:
        bridge.send(None, 0, tag=_READY)  # hangs if that process has ended (Open MPI 5.0.11)
        while not bridge.Iprobe(0, _GO):  # a blocking receive would occupy a core on which others train
            time.sleep(_LOOK_EVERY_S)
        port: str = bridge.recv(source=0, tag=_GO)
        bridge.Free()
    except loss_errors:
        exits.kill_self(0)
    is_admitted.set()
    return port


def _exit_with_parent(parent_pid: int, is_admitted: threading.Event) -> None:
    while not is_admitted.wait(_LOOK_EVERY_S):
        if not psutil.pid_exists(parent_pid):
            exits.kill_self(0)
