"""The software of a host, from the records of its packages: nothing is imported."""

import contextlib
import hashlib
import mmap
import os
import re
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from launch.errors import CommandError, ProcessError
from launch.machine.system import SYSFS, read
from launch.process import ask

PROJECT = Path(__file__).parents[2]
GIT_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Software:
    """The software of a host's ranks; None for what is missing."""

    python: str
    torch: str | None
    torchvision: str | None
    horovod: str | None
    mpi4py: str | None
    numpy: str | None
    tokenizers: str | None
    horovod_has_nccl: bool | None  # None: Horovod is not installed
    nccl: str | None  # included in torch
    cuda: str | None  # that torch was built for
    driver: str | None  # of the GPUs
    project: str | None
    commit: str | None  # None if unknown, also without git
    code: str  # a digest of the project's code


def read_software() -> Software:
    """Read the software of the running interpreter."""
    import platform

    cuda = _torch_cuda()
    packages = ("torch", "torchvision", "horovod", "mpi4py", "numpy", "tokenizers")
    return Software(
        python=platform.python_version(),
        **{name: _version(name) for name in packages},
        horovod_has_nccl=_horovod_has_nccl(),
        nccl=_version(f"nvidia-nccl-cu{cuda.partition('.')[0]}") if cuda else None,
        cuda=cuda,
        driver=read(SYSFS / "module/nvidia/version") or None,
        project=_version("hvdtrain"),
        commit=_commit(),
        code=code_digest(),
    )


def require_hvdtrain(what: str) -> None:
    """Raise CommandError unless hvdtrain, which does this for hvdlaunch, is installed for this Python."""
    if find_spec("hvdtrain") is None:
        raise CommandError(
            f"{what}: needs hvdtrain, and {sys.executable} has only hvdlaunch. Run `make setup` in a clone of "
            "hvdtrain, and use its environment."
        )


def _package(name: str) -> Any:
    """Return the records of an installed package; None without it."""
    from importlib.metadata import PackageNotFoundError, distribution

    with contextlib.suppress(PackageNotFoundError):
        return distribution(name)
    return None


def _version(name: str) -> str | None:
    package = _package(name)
    return package.version if package else None


def _torch_cuda() -> str | None:
    package = _package("torch")
    text = read(Path(str(package.locate_file("torch/version.py")))) if package else ""
    match = re.search(r"^cuda\b.*'([0-9.]+)'", text, re.MULTILINE)
    return match[1] if match else None


def _horovod_has_nccl() -> bool | None:
    """Return whether Horovod's library for torch uses NCCL; None without such a library."""
    package = _package("horovod")
    libraries = [*Path(str(package.locate_file("horovod/torch"))).glob("mpi_lib_v2*.so")] if package else []
    return any(_holds(library, b"ncclAllReduce") for library in libraries) if libraries else None


def _holds(file: Path, word: bytes) -> bool:
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(word) >= 0
    except (OSError, ValueError):  # an empty file
        return False


def _commit() -> str | None:
    """Return the commit that the image was built from, or that is checked out."""
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
    """Return a digest of these packages' code as currently on disk; by default of the whole project."""
    digest = hashlib.sha256()
    for package in packages or ("launch", "hvdtrain"):
        for file in sorted((PROJECT / package).rglob("*.py")):
            if file.is_file():  # an editor's lock is a dangling link
                digest.update(str(file.relative_to(PROJECT)).encode() + file.read_bytes())
    return digest.hexdigest()[:12]
