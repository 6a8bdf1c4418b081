"""Hosts on one machine: each with its own name, address, processes, /dev/shm, /tmp, home and sshd.

A host sees the machine's disk, but for /tmp, /dev/shm, /run, /etc/ssh and the few files of /etc that say who and where
one is. The project, the virtual environment and the parent of the cluster's own folder (a test's tmp_path) have the
same path on every host, as on a shared file system, also where that path is below /tmp.
"""

import contextlib
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote
from types import TracebackType
from typing import IO, Any, NamedTuple, Self

from tests.cluster.namespaces import NAMESPACES, SYSTEM_PATH, TIMEOUT_S, WITH_ITS_PARENT, Holder, Started, tool

PROJECT = Path(__file__).parents[2]
TMP = Path("/tmp")  # noqa: S108 (each host has its own)
SUBNET = "10.73.0.0/24"
OUTSIDE = "outside"
NICS = ("eth0", "ens5", "enp3s0")  # by turns: no name that all hosts have
OUTSIDE_NIC = "eno1"
DOCKER0 = "172.17.0.1/16"
GATEWAY = "169.254.1.1"  # of every host behind the router


class Process(NamedTuple):
    """A process of a host; the pid is the machine's, so that a test can signal it."""

    pid: int
    argv: list[str]


class Host:
    """One host: its part of the cluster's folder, and what runs."""

    def __init__(self, name: str, address: str, nic: str, folder: Path) -> None:
        self.name, self.address, self.nic, self.folder = name, address, nic, folder
        self.home = folder / "home"
        self.bin = folder / "bin"
        self.etc_ssh = folder / "ssh"
        self.path = f"{self.bin}:{SYSTEM_PATH}"
        self.holder: Holder | None = None
        self.sshd: Started | None = None
        self.started: list[Started] = []

    @property
    def running(self) -> Holder:
        assert self.holder is not None
        return self.holder

    def write_folder(self, hosts: str, login_key: Path) -> None:
        """Lay out what the host mounts: home, /etc/ssh and files of /etc; `hosts` is the text of /etc/hosts."""
        for name in ("home/.ssh", "bin", "ssh", "etc", "sys", "tmp"):
            (self.folder / name).mkdir(parents=True)
        (self.home / ".ssh").chmod(0o700)
        shutil.copy(login_key, self.home / ".ssh/id_ed25519")
        make_key(self.etc_ssh / "host_key")
        (self.etc_ssh / "ssh_config").touch()  # what is not the default, the program under test must ask for
        (self.etc_ssh / "sshd_config").write_text(
            f"HostKey {self.etc_ssh}/host_key\nPidFile none\nUsePAM no\nUseDNS no\nStrictModes no\n"
            f"AuthorizedKeysFile {login_key}.pub\nPermitRootLogin prohibit-password\nPasswordAuthentication no\n"
            f"KbdInteractiveAuthentication no\nSetEnv PATH={self.path}\n"
        )
        login = f"root:x:0:0:root:{self.home}:/bin/bash"
        passwd = re.sub(r"^root:.*", login, Path("/etc/passwd").read_text(), flags=re.MULTILINE)
        (self.folder / "etc/passwd").write_text(passwd)
        (self.folder / "etc/shadow").write_text("root:*:19000:0:99999:7:::\n")  # no password, but not locked
        (self.folder / "etc/hosts").write_text(hosts)
        (self.folder / "etc/nsswitch.conf").write_text("passwd: files\ngroup: files\nshadow: files\nhosts: files\n")

    def boot_script(self, shared: Path) -> str:
        """Shell commands of process 1: the host's name and its mounts."""
        tmp, sys_folder = quote(str(self.folder / "tmp")), quote(str(self.folder / "sys"))
        lines = [f"echo {self.name} > /proc/sys/kernel/hostname", f"mount -t tmpfs -o mode=1777 tmpfs {tmp}"]
        for path in sorted({PROJECT, Path(sys.prefix), Path(sys.base_prefix), shared}):
            if path.is_relative_to(TMP):
                there = f"{tmp}/{quote(str(path.relative_to(TMP)))}"
                lines += [f"mkdir -p {there}", f"mount --rbind {quote(str(path))} {there}"]
        lines += [
            f"mount -t sysfs sysfs {sys_folder}",  # /sys/class/net shows the interfaces of whoever mounted it
            f"mount --rbind /sys/fs/cgroup {sys_folder}/fs/cgroup || true",
            f"mount --rbind {sys_folder} /sys",
            f"mount --bind {quote(str(self.etc_ssh))} /etc/ssh",
        ]
        for name in ("hosts", "passwd", "shadow", "nsswitch.conf"):
            lines.append(f"mount --bind {quote(str(self.folder / 'etc' / name))} /etc/{name}")
        lines += [
            f"mount --rbind {tmp} /tmp",
            "mount -t tmpfs -o mode=1777 tmpfs /dev/shm",
            "mount -t tmpfs tmpfs /run",
            "mkdir /run/sshd",
        ]
        return "\n".join(lines)

    def end(self) -> None:
        if self.holder is not None:
            self.holder.end(self.started)


class Cluster:
    """Hosts h1..hN and `outside`, a login node that takes part in no run, from `with` to its end.

    They are on one bridge, or each is alone on its cable to a router.

    Args:
        folder: an empty folder for homes, keys and logs; every host sees its parent.
        hosts: how many, `outside` not counted.
        routed: None for the bridge; else the length of each host's own network: 24 as for one per rack, 32 in clouds.
    """

    subnet = SUBNET

    def __init__(self, folder: Path, *, hosts: int = 2, routed: int | None = None) -> None:
        self.folder = folder.resolve()
        self.routed = routed
        self.names = tuple(f"h{n}" for n in range(1, hosts + 1))
        nics = {name: NICS[n % len(NICS)] for n, name in enumerate(self.names)} | {OUTSIDE: OUTSIDE_NIC}
        self._hosts = {
            name: Host(name, f"10.73.{n}.1" if routed else f"10.73.0.{n}", nic, self.folder / name)
            for n, (name, nic) in enumerate(nics.items(), 1)
        }
        self._hub: Holder | None = None
        self._runs = 0
        self._known: dict[str, str] = {}  # host -> its public key, as in everyone's known_hosts

    def __enter__(self) -> Self:
        try:
            self._write_folders()
            self._boot()
            for host in self._hosts.values():
                self._serve_ssh(host)
            for host in self._hosts.values():
                _wait_for_sshd(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End every process of every host; the kernel takes their interfaces and mounts with them."""
        for host in self._hosts.values():
            host.end()
        if self._hub is not None:
            self._hub.end([])

    # What is on a host

    def address(self, host: str) -> str:
        return self._hosts[host].address

    def nic(self, host: str) -> str:
        return self._hosts[host].nic

    def home(self, host: str) -> Path:
        return self._hosts[host].home

    def start(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        stdin: int | IO[Any] = subprocess.DEVNULL,
        stdout: int | IO[Any] | None = None,
        stderr: int | IO[Any] | None = None,
    ) -> Started:
        """Start a program as root's login on the host would: in its home, with its PATH, plus `env`.

        It has a session of its own. Call this from the thread that made the cluster: it dies with the calling one.
        """
        there = self._hosts[host]
        login = {"HOME": str(there.home), "USER": "root", "LOGNAME": "root", "SHELL": "/bin/bash", "LANG": "C.UTF-8"}
        enter = [*WITH_ITS_PARENT, "nsenter", f"--target={there.running.pid}", *NAMESPACES]
        started = Started(
            [*enter, "env", f"--chdir={cwd or there.home}", *map(str, argv)],
            env={"PATH": there.path, **login, **(env or {})},
            stdin=stdin,
            stdout=stdout,
            stderr=stderr,
            text=True,
            start_new_session=True,
        )
        there.started.append(started)
        return started

    def run(
        self,
        host: str,
        argv: Sequence[str | Path],
        *,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
        cwd: Path | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host to its end; subprocess.TimeoutExpired, with what it printed, after `timeout_s`.

        It prints into files, so that a process which it leaves behind does not keep us here.
        """
        self._runs += 1
        paths = [self.folder / f"run-{self._runs}.{stream}" for stream in ("out", "err")]
        with paths[0].open("w") as out, paths[1].open("w") as err:
            started = self.start(host, argv, env=env, cwd=cwd, stdout=out, stderr=err)
            try:
                status = started.wait(timeout_s)
            except subprocess.TimeoutExpired as error:
                started.kill()
                printed = [path.read_text() for path in paths]
                raise subprocess.TimeoutExpired(error.cmd, timeout_s, *printed) from None
        return subprocess.CompletedProcess([str(word) for word in argv], status, *(path.read_text() for path in paths))

    def processes(self, host: str) -> list[Process]:
        """What lives on a host, apart from its process 1 and its sshd with its sessions; nothing on a dead host."""
        first = self._hosts[host].running.pid
        found = []
        with contextlib.suppress(FileNotFoundError):
            inside = Path(f"/proc/{first}/ns/pid").readlink()
            for entry in Path("/proc").glob("[0-9]*"):
                with contextlib.suppress(OSError):  # it ended while we looked
                    if (entry / "ns/pid").readlink() == inside and int(entry.name) != first:
                        argv = (entry / "cmdline").read_text().rstrip("\0").split("\0")
                        if not Path(argv[0].split(":")[0]).name.startswith("sshd"):
                            found.append(Process(int(entry.name), argv))
        return found

    # What goes wrong

    def kill(self, host: str) -> None:
        """The host dies at once: all its processes, whose connections close, and then its interfaces."""
        self._hosts[host].end()

    def silence(self, host: str) -> None:
        """The host's link loses every packet, both ways: it stays up, addresses resolve, and nobody is told."""
        nic = self._hosts[host].nic
        self._do(host, f"iptables -I INPUT -i {nic} -j DROP && iptables -I OUTPUT -o {nic} -j DROP")

    def refuse_ssh(self, host: str) -> None:
        """Nobody listens on port 22 from now on; sessions that are open stay."""
        sshd = self._hosts[host].sshd
        assert sshd is not None
        sshd.kill()
        sshd.wait()

    def mute_sshd(self, host: str) -> None:
        """Connections to port 22 are accepted, by the kernel, and then hear nothing."""
        sshd = self._hosts[host].sshd
        assert sshd is not None
        sshd.send_signal(signal.SIGSTOP)

    def prompt_for_password(self, host: str) -> None:
        """The host wants a password in place of a key; no password is right."""
        self._restart_sshd(host, "-oPubkeyAuthentication=no", "-oPasswordAuthentication=yes", "-oPermitRootLogin=yes")

    def change_host_key(self, host: str) -> None:
        """The host shows another key than the one in everyone's known_hosts."""
        make_key(self._hosts[host].etc_ssh / "host_key")
        self._restart_sshd(host)

    def forget_host_key(self, host: str) -> None:
        """Nobody's known_hosts has the host's key any more."""
        del self._known[host]
        self._write_known_hosts()

    def put_on_path(self, host: str, name: str, script: str) -> Path:
        """Put a program first on the host's login PATH, that of ssh and that of run()."""
        program = self._hosts[host].bin / name
        program.write_text(script)
        program.chmod(0o755)
        return program

    def hide(self, host: str, path: Path) -> None:
        """On this host only, an empty folder, or an empty file that cannot be executed, lies over `path`."""
        empty = self.folder / ("nothing" if path.is_dir() else "nothing.txt")
        if path.is_dir():
            empty.mkdir(exist_ok=True)
        else:
            empty.touch()
        self._do(host, f"mount --bind {quote(str(empty))} {quote(str(path))}")

    # How it is made

    def _write_folders(self) -> None:
        login_key = self.folder / "login_key"
        make_key(login_key)
        hosts = "".join(f"{host.address} {host.name}\n" for host in self._hosts.values())
        for host in self._hosts.values():
            host.write_folder(f"127.0.0.1 localhost\n{hosts}", login_key)
            self._known[host.name] = (host.etc_ssh / "host_key.pub").read_text()
        self._write_known_hosts()

    def _write_known_hosts(self) -> None:
        lines = [f"{name},{self._hosts[name].address} {key.strip()}\n" for name, key in self._known.items()]
        for host in self._hosts.values():
            (host.home / ".ssh/known_hosts").write_text("".join(lines))

    def _boot(self) -> None:
        """Start every host, and lay a cable from each to the bridge, which has a network of its own, or the router."""
        bridge = "ip link add name bridge0 type bridge\nip link set bridge0 up"
        router = "echo 1 > /proc/sys/net/ipv4/ip_forward"
        self._hub = Holder(router if self.routed else bridge, self.folder / "hub.log", processes=False)
        for host in self._hosts.values():
            host.holder = Holder(host.boot_script(self.folder.parent), host.folder / "boot.log", processes=True)
        self._hub.wait()
        for host in self._hosts.values():
            host.running.wait()
            self._hub.ip(
                f"link add to-{host.name} type veth peer name {host.nic} netns {host.running.pid}\n"
                f"link set to-{host.name} up\n"
            )
            host.running.ip(
                f"link set lo up\naddress add {host.address}/{self.routed or 24} dev {host.nic}\n"
                f"link set {host.nic} up\n"
                f"link add docker0 type bridge\naddress add {DOCKER0} dev docker0\nlink set docker0 up\n"
                # a running container's cable: without one, docker0 would have no carrier
                "link add veth0 type veth peer name veth1\nlink set veth0 master docker0 up\nlink set veth1 up\n"
            )
            if self.routed:
                cable = f"dev to-{host.name}"
                self._hub.ip(f"address add {GATEWAY}/32 {cable}\nroute add {host.address}/32 {cable}\n")
                way = f"dev {host.nic}"
                host.running.ip(f"route add {GATEWAY} {way}\nroute add default via {GATEWAY} {way}\n")
            else:
                self._hub.ip(f"link set to-{host.name} master bridge0\n")

    def _serve_ssh(self, host: Host, *options: str) -> None:
        with (host.folder / "sshd.log").open("w") as log:
            host.sshd = self.start(host.name, [tool("sshd") or "sshd", "-D", "-e", *options], stdout=log, stderr=log)

    def _restart_sshd(self, name: str, *options: str) -> None:
        self.refuse_ssh(name)
        self._serve_ssh(self._hosts[name], *options)
        _wait_for_sshd(self._hosts[name])

    def _do(self, host: str, script: str) -> None:
        done = self.run(host, ["sh", "-c", script], timeout_s=TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"{host}: {script}: {done.stderr.strip()}")


def _wait_for_sshd(host: Host) -> None:
    log = host.folder / "sshd.log"
    end = time.monotonic() + TIMEOUT_S
    while "Server listening on 0.0.0.0" not in log.read_text():
        if time.monotonic() > end:
            raise RuntimeError(f"no sshd on {host.name}: {log.read_text().strip()}")
        time.sleep(0.01)


def make_key(path: Path) -> None:
    path.unlink(missing_ok=True)
    keygen = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)]
    subprocess.run(keygen, check=True, timeout=TIMEOUT_S)
