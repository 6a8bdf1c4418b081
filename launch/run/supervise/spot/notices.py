"""The notices of all hosts of a run: before its start, during it, and before a restart."""

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path

from launch.errors import HostError, LaunchError, harmless
from launch.hosts.probe import at_once, combine_errors, is_local
from launch.hosts.ssh import Ssh
from launch.placement.slots import hosts_of
from launch.process import PIPE, BackgroundProcess
from launch.run.start.render import PreparedRun
from launch.run.supervise.screen import Screen
from launch.run.supervise.spot.clouds import CLOUDS, ENABLE_S, read_notice
from launch.run.supervise.spot.watch import MARK, SILENT

POLL_S = 0.5
AGAIN_S = 10.0  # until a watcher that has ended is started again
ACKNOWLEDGE_S = 10.0


class Notices:
    """The watchers of one run, one on each host; without --spot there are none."""

    def __init__(self, prepared: PreparedRun, screen: Screen) -> None:
        self.hosts: dict[str, str] = {}  # those that are ended -> the notice
        self._prepared, self._screen, self._cloud = prepared, screen, prepared.plan.request.spot
        self._watchers: dict[str, BackgroundProcess] = {}
        self._rest: dict[str, bytes] = {}  # of a watcher's output, the incomplete last line
        self._next_s = {host.name: 0.0 for host in hosts_of(prepared.plan.slots)} if self._cloud else {}
        self._silent: set[str] = set()  # hosts whose failure is printed

    def __enter__(self) -> "Notices":
        return self

    def poll(self) -> bool:
        """Return whether a host is ended; does not wait."""
        for host, next_s in self._next_s.items():
            if time.monotonic() >= next_s and host not in self.hosts:
                self._next_s[host] = time.monotonic() + POLL_S
                self._poll_host(host)
        return bool(self.hosts)

    def __exit__(self, *_: object) -> None:
        """End the watchers, and let Azure end the hosts now."""
        for watcher in self._watchers.values():
            watcher.end()
        launcher = self._prepared.launcher
        for host in () if self._cloud != "azure" else self.hosts:
            if host not in self._prepared.plan.local:  # this process would end, too
                with contextlib.suppress(LaunchError):
                    words = _words(launcher.python, self._cloud, "acknowledge")
                    launcher.ssh.ask(host, words, str(Path.cwd()), mark=MARK, timeout_s=ACKNOWLEDGE_S)

    def why(self) -> str:
        """Return the notices in one line; empty without any."""
        return "; ".join(f"host {host}: {notice}" for host, notice in self.hosts.items())

    def _poll_host(self, host: str) -> None:
        if (watcher := self._watchers.get(host)) is None:
            self._start(host)
            return
        *lines, self._rest[host] = (self._rest[host] + watcher.read()).split(b"\n")
        for line in (one.decode(errors="replace") for one in lines):
            if line.startswith(MARK):
                self.hosts[host] = harmless(line.removeprefix(MARK))
                self._warn(f"host {host}: {self.hosts[host]}; stopping the run")
                return
            if line.startswith(SILENT):
                self._warn_once(host, line.removeprefix(SILENT))
        if watcher.status() is not None:
            self._warn_once(host, "the watcher there has ended")
            watcher.end()
            del self._watchers[host]
            self._next_s[host] = time.monotonic() + AGAIN_S

    def _start(self, host: str) -> None:
        launcher = self._prepared.launcher
        words = _words(launcher.python, self._cloud, "follow")
        if host not in self._prepared.plan.local:
            words = launcher.ssh.command(host, words, str(Path.cwd()))
        self._watchers[host], self._rest[host] = BackgroundProcess(words, out=PIPE), b""

    def _warn_once(self, host: str, why: str) -> None:
        if host not in self._silent:
            self._warn(f"host {host}: --spot {self._cloud} cannot read its notices ({why}); trying again")
        self._silent.add(host)

    def _warn(self, text: str) -> None:
        self._screen.show(f"{harmless(f'hvdlaunch: warning: {text}')}\n".encode())


def require_notices(prepared: PreparedRun) -> None:
    """Raise HostError if --spot cannot read the notices of a host of this run, or if one is about to be ended."""
    if (cloud := prepared.plan.request.spot) is None:
        return
    hosts = [host.name for host in hosts_of(prepared.plan.slots)]
    found = _now(hosts, cloud, ssh=prepared.launcher.ssh, python=prepared.launcher.python)
    refused = {host: _refusal(host, cloud, notice) for host, notice in found.items() if notice}
    if refused:
        raise combine_errors(refused, of=len(hosts))


def hosts_ending(hosts: Sequence[str], cloud: str | None, *, ssh: Ssh, python: str) -> dict[str, HostError]:
    """Return the hosts with a notice, as an error about each; a host whose notices cannot be read has none."""
    found = _now(hosts, cloud, ssh=ssh, python=python) if cloud else {}
    return {host: HostError(f"host {host}: {text}") for host, text in found.items() if text and isinstance(text, str)}


def _refusal(host: str, cloud: str, notice: str | LaunchError) -> LaunchError:
    if isinstance(notice, str):
        return HostError(f"host {host}: {notice}. Leave it out.")
    why = str(notice).removeprefix(f"host {host}: ")
    return HostError(f"host {host}: --spot {cloud}: {why}. Pass the cloud of this host, or leave --spot out.")


def _now(hosts: Sequence[str], cloud: str, *, ssh: Ssh, python: str) -> dict[str, str | LaunchError]:
    """Return the notice of each host, "" without one, or why it cannot be read."""
    folder = str(Path.cwd())

    def notice_of(host: str) -> str | LaunchError:
        try:
            if is_local(host):
                return read_notice(CLOUDS[cloud]()) or ""
            words = _words(python, cloud, "now")
            return harmless(ssh.ask(host, words, folder, mark=MARK, timeout_s=ENABLE_S + ACKNOWLEDGE_S))
        except LaunchError as error:
            return error

    return at_once(notice_of, hosts)


def _words(python: str, cloud: str | None, what: str) -> list[str]:
    return [python, "-P", "-m", "launch.run.supervise.spot.watch", str(cloud), what]
