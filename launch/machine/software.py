"""Which software a host has, by the records of its packages: nothing of it is imported."""

import hashlib
import mmap
import os
import re
from dataclasses import dataclass
from pathlib import Path

from launch.errors import ProcessError
from launch.machine.system import SYSFS
from launch.process import ask

PROJECT = Path(__file__).parents[2]
GIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Software:
    """What the ranks of a host would run on; None for what is not there."""

    python: str
    torch: str | None
    torchvision: str | None
    horovod: str | None
    mpi4py: str | None
    numpy: str | None
    tokenizers: str | None
    horovod_has_nccl: bool | None  # None: Horovod is not installed
    nccl: str | None  # the one that comes with torch
    cuda: str | None  # for which torch was built
    driver: str | None  # of the GPUs
    project: str | None
    commit: str | None  # None also where nobody has git
    code: str  # a digest of the project's code


def read_software() -> Software:
    """The software of the interpreter that runs this."""
    import platform

    cuda = _torch_cuda()
    return Software(
        python=platform.python_version(),
        torch=_version("torch"),
        torchvision=_version("torchvision"),
        horovod=_version("horovod"),
        mpi4py=_version("mpi4py"),
        numpy=_version("numpy"),
        tokenizers=_version("tokenizers"),
        horovod_has_nccl=_horovod_has_nccl(),
        nccl=_version(f"nvidia-nccl-cu{cuda.partition('.')[0]}") if cuda else None,
        cuda=cuda,
        driver=_read(SYSFS / "module/nvidia/version").strip() or None,
        project=_version("hvdtrain"),
        commit=_commit(),
        code=code_digest(),
    )


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _installed(package: str, inside: str) -> Path | None:
    """Where a file or folder of a package is; None if the package is not there."""
    from importlib.metadata import PackageNotFoundError, distribution

    try:
        return Path(str(distribution(package).locate_file(inside)))
    except PackageNotFoundError:
        return None


def _torch_cuda() -> str | None:
    file = _installed("torch", "torch/version.py")
    match = re.search(r"^cuda\b.*'([0-9.]+)'", _read(file), re.MULTILINE) if file else None
    return match[1] if match else None


def _horovod_has_nccl() -> bool | None:
    """Whether Horovod's library for torch calls NCCL; None if there is no such library."""
    folder = _installed("horovod", "horovod/torch")
    libraries = [*folder.glob("mpi_lib_v2*.so")] if folder else []
    return any(_holds(library, b"ncclAllReduce") for library in libraries) if libraries else None


def _holds(file: Path, word: bytes) -> bool:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(word) >= 0
    except (OSError, ValueError):  # an empty file
        return False


def _commit() -> str | None:
    """The commit that the image was built from, or that is checked out."""
    if (built := os.environ.get("HVDTRAIN_COMMIT")) is not None:
        return built
    if not (PROJECT / ".git").exists():
        return None
    try:
        answer = ask(["git", "-C", str(PROJECT), "rev-parse", "HEAD"], timeout_s=GIT_S)
    except ProcessError:
        return None
    return None if answer.status else answer.out.strip()


def code_digest(*packages: str) -> str:
    """A digest of these packages' code as it is on disk now, of the whole project's if none is named."""
    digest = hashlib.sha256()
    for package in packages or ("launch", "hvdtrain"):
        for file in sorted((PROJECT / package).rglob("*.py")):
            if file.is_file():  # an editor's lock is a link to nothing
                digest.update(str(file.relative_to(PROJECT)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def _read(file: Path) -> str:
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError):
        return ""
