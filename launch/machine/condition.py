"""What a host is like beside its topology: software, limits, folders, and settings of its own."""

import contextlib
import os
import re
import resource
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.machine.mounts import storage_of
from launch.machine.software import Software, read_software
from launch.machine.system import ROOT

SHM = "/dev/shm"  # noqa: S108 (looked at alone)
SETTING = re.compile(
    r"NCCL_\w+|HOROVOD_(?!(LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS|HOSTNAME)\w+"  # these tell of another process
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|(?<!_IB_P)KEY", re.IGNORECASE)
NCCL_FILES = (os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf")  # noqa: PTH111 (there may be no home)
CAP_IPC_LOCK = 14  # linux/capability.h: who has it may lock all memory there is


@dataclass(frozen=True, kw_only=True)
class Look:
    """What a host is to look at beside its topology."""

    folders: tuple[str, ...]  # absolute; the run folder first
    token: str | None  # a file in the run folder, made by who asks; None: it could not make one


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of a run, or what is there of the way to it."""

    path: str
    there: bool
    writable: bool | None  # it, or the nearest folder above that is there; None: not tried, it is only read
    free_mib: int | None  # None: not known
    file_system: str | None = None  # ext4, nfs4; None where not known
    disks: tuple[str, ...] = ()  # it is on these, whole ones: nvme0n1; empty where it is on none, or not known


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One setting of NCCL or Horovod that a host gives to its ranks by itself."""

    name: str
    value: str
    source: str  # its environment, or a file


@dataclass(frozen=True, kw_only=True)
class Condition:
    """What a host has answered to a look."""

    software: Software
    locked_memory_mib: int | None  # a process may lock so much; None: no limit
    shm_free_mib: int | None  # of /dev/shm; None: there is none
    folders: tuple[Folder, ...]  # as asked
    sees_token: bool | None  # None: there was none to see
    settings: tuple[Setting, ...]


@contextlib.contextmanager
def looking(run_folder: Path, *others: Path) -> Iterator[Look]:
    """A look at these folders, with a file that is there, in the run folder or above it, as long as hosts are asked."""
    token = None
    with contextlib.suppress(OSError):
        number, token = tempfile.mkstemp(prefix=".hvdlaunch-", dir=_nearest(run_folder))
        os.close(number)
    try:
        yield Look(folders=(str(run_folder), *map(str, others)), token=token)
    finally:
        if token is not None:
            Path(token).unlink(missing_ok=True)


def read_condition(look: Look) -> Condition:
    """The condition of this host."""
    return Condition(
        software=read_software(),
        locked_memory_mib=_locked_memory_mib(),
        shm_free_mib=_free_mib(Path(SHM)),
        folders=tuple(_folder(Path(path), is_written=place == 0) for place, path in enumerate(look.folders)),
        sees_token=None if look.token is None else _is_there(Path(look.token)),
        settings=_settings(os.environ, map(Path, NCCL_FILES)),
    )


def _settings(environment: Mapping[str, str], files: Iterable[Path]) -> tuple[Setting, ...]:
    """The settings of an environment and of NCCL's own files, of which an earlier one wins, without secrets."""
    settings = {name: (value, "its environment") for name, value in environment.items()}
    for file in files:
        with contextlib.suppress(OSError, UnicodeDecodeError):
            for line in file.read_text().splitlines():
                name, equals, value = line.partition("=")
                if equals and not line.startswith("#"):
                    settings.setdefault(name.strip(), (value.strip(), str(file)))
    return tuple(
        Setting(name=name, value=value, source=source)
        for name, (value, source) in sorted(settings.items())
        if SETTING.fullmatch(name) and not SECRET.search(name)
    )


def _locked_memory_mib() -> int | None:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if limit == resource.RLIM_INFINITY or _may_lock_all() else limit >> 20


def _may_lock_all() -> bool:
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return False
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return bool(match and int(match[1], 16) >> CAP_IPC_LOCK & 1)


def _folder(path: Path, *, is_written: bool) -> Folder:
    nearest = _nearest(path)
    file_system, disks = storage_of(nearest, ROOT)
    return Folder(
        path=str(path),
        there=_is_there(path),
        writable=_takes_files(nearest) if is_written else None,
        free_mib=_free_mib(nearest),
        file_system=file_system,
        disks=disks,
    )


def _takes_files(folder: Path) -> bool:
    """Whether a file can be made there, as a run does; permissions do not tell of /proc, a read-only disk or root."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest one above it that is there."""
    return next(ancestor for ancestor in (folder, *folder.parents) if _is_there(ancestor))


def _is_there(path: Path) -> bool:
    try:
        path.stat()
    except OSError:
        return False
    return True


def _free_mib(folder: Path) -> int | None:
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_bavail * facts.f_frsize >> 20 if facts.f_blocks else None  # /proc and others have none
