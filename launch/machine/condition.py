"""The condition of a host besides its topology: software, limits, folders, and its own settings."""

import contextlib
import os
import re
import resource
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from launch.machine.software import Software, read_software
from launch.machine.system import ROOT, read

SHM = "/dev/shm"  # noqa: S108 (only inspected)
SETTING = re.compile(
    r"NCCL_\w+|HOROVOD_(?!(LOCAL_|CROSS_)?(RANK|SIZE)|GLOO_RENDEZVOUS|HOSTNAME)\w+"  # these describe another process
)
SECRET = re.compile(r"TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|(?<!_IB_P)KEY", re.IGNORECASE)
NCCL_FILES = (os.path.expanduser("~/.nccl.conf"), "/etc/nccl.conf")  # noqa: PTH111 (there may be no home)
CAP_IPC_LOCK = 14  # linux/capability.h: may lock any amount of memory


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """The request for a host's condition, besides its topology."""

    folders: tuple[str, ...]  # absolute; the run folder first
    token: str | None  # a file that the probing host has created in the run folder; None: it could not
    program: str | None = None  # the absolute path of the ranks' program


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A folder of a run, or the existing part of its path."""

    path: str
    there: bool
    writable: bool | None  # the folder, or its nearest existing parent; None: not tested, because it is only read
    free_mib: int | None  # None: unknown
    file_system: str | None = None  # for example ext4, nfs4; None if unknown


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A setting of NCCL or Horovod that a host itself gives to its ranks."""

    name: str
    value: str
    source: str  # its environment, or a file


@dataclass(frozen=True, kw_only=True)
class Condition:
    """The condition that a host has reported."""

    software: Software
    locked_memory_mib: int | None  # that a process may lock; None: no limit
    shm_free_mib: int | None  # of /dev/shm; None if missing
    folders: tuple[Folder, ...]  # in the requested order
    sees_token: bool | None  # None: no token was created
    settings: tuple[Setting, ...]
    missing_program: str | None = None  # the path of the ranks' program, if it cannot be executed there


@contextlib.contextmanager
def open_inspection(run_folder: Path, *others: Path, program: str | None = None) -> Iterator[Inspection]:
    """Provide a request to inspect these folders and the program, with a token in or above the run folder meanwhile."""
    token = None
    with contextlib.suppress(OSError):
        number, token = tempfile.mkstemp(prefix=".hvdlaunch-", dir=_nearest(run_folder))
        os.close(number)
    try:
        yield Inspection(folders=(str(run_folder), *map(str, others)), token=token, program=program)
    finally:
        if token is not None:
            Path(token).unlink(missing_ok=True)


def read_condition(inspection: Inspection) -> Condition:
    """Read the condition of this host."""
    return Condition(
        software=read_software(),
        locked_memory_mib=_locked_memory_mib(),
        shm_free_mib=_free_mib(Path(SHM)),
        folders=tuple(_folder(Path(path), is_written=place == 0) for place, path in enumerate(inspection.folders)),
        sees_token=None if inspection.token is None else _is_there(Path(inspection.token)),
        settings=_settings(os.environ, map(Path, NCCL_FILES)),
        missing_program=inspection.program if inspection.program and shutil.which(inspection.program) is None else None,
    )


def _settings(environment: Mapping[str, str], files: Iterable[Path]) -> tuple[Setting, ...]:
    """Return the settings of an environment and of NCCL's files, without secrets; earlier files take precedence."""
    settings = {name: (value, "its environment") for name, value in environment.items()}
    for file in files:
        for line in read(file).splitlines():
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
    match = re.search(r"^CapEff:\s*([0-9a-f]+)$", read(ROOT / "proc/self/status"), re.MULTILINE)
    may_lock_all = match is not None and int(match[1], 16) >> CAP_IPC_LOCK & 1
    return None if limit == resource.RLIM_INFINITY or may_lock_all else limit >> 20


def _folder(path: Path, *, is_written: bool) -> Folder:
    nearest = _nearest(path)
    return Folder(
        path=str(path),
        there=_is_there(path),
        writable=_takes_files(nearest) if is_written else None,
        free_mib=_free_mib(nearest),
        file_system=file_system_of(nearest, ROOT),
    )


def file_system_of(folder: Path, root: Path) -> str | None:
    """Return the file system of an existing folder, such as ext4 or nfs4; None if the kernel shows no mounts."""
    place, deepest, file_system = folder.resolve(), 0, None
    for line in read(root / "proc/self/mountinfo").splitlines():  # proc(5): id parent major:minor root point ... - type
        mount, _, kind = line.partition(" - ")
        point = Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), mount.split()[4]))
        if place.is_relative_to(point) and len(point.parts) >= deepest:  # a later mount covers an earlier one
            deepest, file_system = len(point.parts), kind.split()[0]
    return file_system


def _takes_files(folder: Path) -> bool:
    """Return whether a file can be created; permissions are not enough for /proc, a read-only disk or root."""
    with contextlib.suppress(OSError), tempfile.TemporaryFile(dir=folder):
        return True
    return False


def _nearest(folder: Path) -> Path:
    """Return the folder, or its nearest existing parent."""
    return next(ancestor for ancestor in (folder, *folder.parents) if _is_there(ancestor))


def _is_there(path: Path) -> bool:
    with contextlib.suppress(OSError):
        path.stat()
        return True
    return False


def _free_mib(folder: Path) -> int | None:
    with contextlib.suppress(OSError):
        facts = os.statvfs(folder)
        return facts.f_bavail * facts.f_frsize >> 20 if facts.f_blocks else None  # /proc and others have none
    return None
