"""A secret in the environment of a run, and where it must not show."""

import contextlib
import gzip
import os
import stat
import time
import zipfile
from collections.abc import Callable, Iterator
from ipaddress import ip_address
from pathlib import Path

import psutil

from tests.mpi.conftest import left_in

# The last ones look like settings that a run writes down.
NAMES = (
    *("HVD_CANARY_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "PGPASSWORD"),
    *("HVDTRAIN_CANARY_TOKEN", "HOROVOD_SECRET_KEY", "NCCL_CANARY_PASSWORD"),
)


def told(secret: str, folder: Path) -> list[str]:
    """Files and folders that hold the secret, in their names, their bytes or what is packed in them."""
    found = []
    for parent, folders, files in os.walk(folder):
        found += [f"{parent}/{name}" for name in (*folders, *files) if secret in name]
        for path in (Path(parent) / name for name in files):
            if path.is_file():
                found += [f"{path} {part}".rstrip() for part, content in _contents(path) if secret.encode() in content]
    return found


def _contents(path: Path) -> Iterator[tuple[str, bytes]]:
    with contextlib.suppress(FileNotFoundError):  # of a run that goes on
        content = path.read_bytes()
        yield "", content
        if content[:2] == b"\x1f\x8b":
            yield "unpacked", gzip.decompress(content)
        if zipfile.is_zipfile(path):
            with zipfile.ZipFile(path) as archive:
                for name in archive.namelist():
                    yield name, archive.read(name)


def open_to_others(folder: Path) -> list[str]:
    """What in a folder, itself included, is not 0700 or 0600."""
    wanted = {True: 0o700, False: 0o600}
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in (folder, *folder.rglob("*"))}
    return [f"{mode:o} {path}" for path, mode in modes.items() if mode != wanted[path.is_dir()]]


def on_command_lines(secret: str) -> set[str]:
    """The command lines of this machine, all its namespaces included, that hold the secret."""
    found = set()
    for pid in psutil.pids():
        with contextlib.suppress(OSError):
            line = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            if secret in line:
                found.add(line)
    return found


def listening(folder: Path) -> set[tuple[str, str]]:
    """Program and address of each TCP socket that waits for others, of the processes that work in this folder."""
    found = set()
    for process in left_in(folder):
        with contextlib.suppress(psutil.Error):
            words = process.cmdline()
            name = Path(words[0]).name if words else ""
            for one in process.net_connections(kind="tcp"):
                if one.status == psutil.CONN_LISTEN and not ip_address(one.laddr.ip).is_loopback:
                    found.add((name, one.laddr.ip))
    return found


def watched(goes_on: Callable[[], bool], *looks: Callable[[], set]) -> list[set]:
    """What each look has ever seen until the run had ended; it has been looked at several times."""
    seen: list[set] = [set() for _ in looks]
    times = 0
    while goes_on():
        seen = [before | look() for before, look in zip(seen, looks, strict=True)]
        times += 1
        time.sleep(0.1)
    assert times > 5
    return seen
