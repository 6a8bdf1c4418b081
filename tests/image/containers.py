"""Containers of the built image without an engine: root folder, network, processes and shared memory of their own.

They start as Docker starts them, with the image's entrypoint, user, folder and environment. What Docker adds besides, a
seccomp filter and fewer capabilities for root, is not here.
"""

import json
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.cluster.namespaces import NAMESPACES, WITH_ITS_PARENT, Holder, Started

SUBNET = "10.74.0"
TIMEOUT_S = 30.0


def buildah(*words: str) -> str:
    return subprocess.run(["buildah", *words], check=True, capture_output=True, text=True, timeout=120).stdout.strip()


@dataclass(frozen=True, kw_only=True)
class Image:
    """The image as it lies on the disk."""

    name: str
    root: Path  # its files, mounted
    config: Mapping[str, Any]  # as OCI spells it: User, Env, Entrypoint, WorkingDir, Labels


def open_image(name: str) -> tuple[Image, str]:
    """The image, and the buildah container through which it is mounted."""
    config = json.loads(buildah("inspect", "--type", "image", name))["OCIv1"]["config"]
    container = buildah("from", "--pull-never", name)
    return Image(name=name, root=Path(buildah("mount", container)), config=config), container


class Container:
    """One container; it ends with `end()`, with everything in it."""

    def __init__(
        self, image: Image, name: str, folder: Path, *, hosts: str = "", volumes: Mapping[str, Path] | None = None
    ) -> None:
        """Make it, with nothing running; `hosts` is added to /etc/hosts, `volumes` are path inside -> folder."""
        self.image, self.name = image, name
        self.written = folder / name / "written"  # files that differ from the image's
        root, work = folder / name / "root", folder / name / "work"
        for path in (root, work, self.written / "etc"):
            path.mkdir(parents=True)
        (self.written / "etc/hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        lines = [
            f"echo {name} >/proc/sys/kernel/hostname",
            "echo 0 >/proc/sys/net/ipv4/ip_unprivileged_port_start",  # as Docker does
            f"mount -t overlay -o lowerdir={image.root},upperdir={self.written},workdir={work} overlay {root}",
            f"mount -t proc proc {root}/proc",
            f"mount -t sysfs sysfs {root}/sys",
            f"mount --rbind /dev {root}/dev",
            f"mount -t tmpfs -o mode=1777,size=64m tmpfs {root}/dev/shm",  # noqa: S108 - Docker's size
        ]
        for inside, outside in (volumes or {}).items():
            there = f"{root}{inside}"
            lines += [f"mkdir -p {there}", f"mount --bind {outside} {there}"]
        self._root, self._folder = root, folder / name
        self._holder = Holder("\n".join([*lines, "ip link set lo up"]), folder / name / "boot.log", processes=True)
        self._started: list[Started] = []
        self._holder.wait()

    def cable(self, hub: Holder, address: str) -> None:
        """An interface with this address on the hub's bridge."""
        hub.ip(
            f"link add to-{self.name} type veth peer name eth0 netns {self._holder.pid}\n"
            f"link set to-{self.name} master bridge0 up\n"
        )
        self._holder.ip(f"address add {address}/24 dev eth0\nlink set eth0 up\n")

    def start(self, words: Sequence[str], *, env: Sequence[str] = (), entrypoint: bool = True) -> Started:
        """Start a command as `docker run` does, or without the entrypoint as `docker exec` does."""
        config = self.image.config
        enter = [*WITH_ITS_PARENT, "nsenter", f"--target={self._holder.pid}", *NAMESPACES]
        chroot = ["chroot", f"--userspec={config['User']}", "--groups=", str(self._root)]
        environment = ["env", "-i", f"--chdir={config['WorkingDir']}", "HOME=/home/hvdtrain", *config["Env"], *env]
        words = [*(config["Entrypoint"] if entrypoint else []), *words]
        with self._log(len(self._started)).open("w") as log:
            how = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "start_new_session": True}
            started = Started([*enter, *chroot, *environment, *words], text=True, **how)
        self._started.append(started)
        return started

    def run(
        self, words: Sequence[str], *, env: Sequence[str] = (), entrypoint: bool = True, timeout_s: float = TIMEOUT_S
    ) -> tuple[int, str]:
        """Exit status, and what this command has printed."""
        number = len(self._started)
        status = self.start(words, env=env, entrypoint=entrypoint).wait(timeout_s)
        return status, self._log(number).read_text()

    def printed(self) -> str:
        """What all commands have printed."""
        return "".join(self._log(number).read_text() for number in range(len(self._started)))

    def _log(self, number: int) -> Path:
        return self._folder / f"{number}.log"

    def wait_until(self, words: Sequence[str]) -> None:
        """Ask this question until its status is 0, as a health check does."""
        end = time.monotonic() + TIMEOUT_S
        while self.run(words, entrypoint=False)[0] != 0:
            assert time.monotonic() < end, self.printed()
            time.sleep(0.2)

    def end(self) -> None:
        self._holder.end(self._started)


def new_volume(image: Image, inside: str, folder: Path) -> Path:
    """A new named volume: as Docker does, it takes owner and mode of what the image has there."""
    folder.mkdir(parents=True)
    there = (image.root / inside.lstrip("/")).stat()
    os.chown(folder, there.st_uid, there.st_gid)
    folder.chmod(there.st_mode & 0o7777)
    return folder
