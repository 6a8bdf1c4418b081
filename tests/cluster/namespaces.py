"""Programs in Linux namespaces that have no name on the machine: they last as long as the process that holds them.

A holder dies with the thread that made it (kill -9 included), process 1 of its process space with the holder, and with
process 1 the kernel takes every process, interface and mount of it. So there is nothing to find and remove after a
crash, and no two of them can meet.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
TOOLS = ("ip", "sshd", "ssh", "ssh-keygen", "iptables", "unshare", "nsenter", "setpriv", "env", "sleep")
WITH_ITS_PARENT = ("setpriv", "--pdeathsig=KILL")
TIMEOUT_S = 20.0
# Orphans come to process 1; with SIGCHLD ignored the kernel buries them.
STAY = "exec env --ignore-signal=CHLD sleep infinity"


def why_not() -> str | None:
    """Why no hosts can be made on this machine, or None where they can."""
    if sys.platform != "linux":
        return "hosts are made of Linux namespaces"
    if os.geteuid() != 0:
        return "network namespaces need root"
    if missing := [name for name in TOOLS if tool(name) is None]:
        return f"not installed: {', '.join(missing)}"
    trial = (
        "ip link add name to0 type bridge && ip link add name to1 type veth peer name to2 && iptables -I INPUT -j DROP"
    )
    unshare = ["unshare", *NAMESPACES, "--fork", "--mount-proc", "sh", "-c", trial]
    tried = subprocess.run(unshare, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return f"the kernel refuses: {' '.join(tried.stderr.split())}" if tried.returncode else None


def tool(name: str) -> str | None:
    """Absolute path of a program, sshd's folder included, which a user's PATH may lack."""
    return shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SYSTEM_PATH}")


class Started(subprocess.Popen[str]):
    """A program in the namespaces of another process. Signals reach the program itself, not the nsenter that waits."""

    @property
    def program(self) -> int | None:
        """The program's pid on the machine; None once it has ended."""
        while self.poll() is None:
            if found := children(self.pid):
                return found[0]
            time.sleep(0.001)
        return None

    def send_signal(self, sig: int) -> None:
        """As subprocess.Popen's; kill() and terminate() come here too."""
        if (pid := self.program) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, sig)
                if sig in (signal.SIGKILL, signal.SIGCONT):
                    os.kill(self.pid, signal.SIGCONT)  # nsenter stops itself when its program is stopped

    def end(self) -> None:
        """Wait for nsenter to bury its program, which has been killed; one that is stopped must be woken for that."""
        while self.poll() is None:
            os.kill(self.pid, signal.SIGCONT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.wait(0.1)


class Holder:
    """Namespaces of their own and the process that keeps them; `pid` is what to enter, by its pid on the machine."""

    def __init__(self, script: str, log: Path, *, processes: bool) -> None:
        """Start `script` in a new network or, with `processes`, in new namespaces of every kind, as process 1.

        The script prints "ready" and then stays; wait() for that. What it prints on stderr goes to `log`.
        """
        kinds = [*NAMESPACES, "--fork", "--kill-child", "--mount-proc"] if processes else ["--net"]
        self._log, self._processes, self.pid = log, processes, 0
        with log.open("w") as stderr:
            self._unshare = subprocess.Popen(
                [*WITH_ITS_PARENT, "unshare", *kinds, "sh", "-c", f"set -e\n{script}\necho ready\n{STAY}"],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                start_new_session=True,
            )

    def wait(self) -> None:
        assert self._unshare.stdout is not None
        if self._unshare.stdout.readline() != "ready\n":
            raise RuntimeError(f"no namespaces: {self._log.read_text().strip()}")
        (self.pid,) = children(self._unshare.pid) if self._processes else [self._unshare.pid]

    def end(self, started: list[Started]) -> None:
        """Kill process 1 and wait until nothing is left of it, `started` in it included."""
        if self._unshare.poll() is None:
            first = children(self._unshare.pid) if self._processes else []
            os.kill(first[0] if first else self._unshare.pid, signal.SIGKILL)
        for program in started:
            program.end()
        self._unshare.wait()
        if self._unshare.stdout is not None:
            self._unshare.stdout.close()

    def ip(self, commands: str) -> None:
        """Run a batch of ip commands in this network."""
        enter = ["nsenter", f"--target={self.pid}", "--net", "ip", "-batch", "-"]
        subprocess.run(enter, input=commands, text=True, check=True, timeout=TIMEOUT_S)


def children(pid: int) -> list[int]:
    """Pids of a process's children."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended while we looked
            if int(stat.read_text().rpartition(")")[2].split()[1]) == pid:
                found.append(int(stat.parent.name))
    return found
