"""The environment of a process: versions, host, command, commit, and a hash of the code."""

import base64
import contextlib
import hashlib
import json
import os
import platform
import re
import socket
import sys
import zlib
from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import psutil

from hvdtrain.ranks.libraries import library_versions

# Names of variables and options whose values must not be recorded; --tokenizer and --max-tokens may be.
_SECRET = re.compile(r"[\w-]*(TOKEN(?!IZ|S)|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|KEY)[\w-]*", re.IGNORECASE)
# Names of a program's own settings; label_key and mask_token may be recorded.
_SECRET_FIELD = re.compile(
    r"(.*_)?(api_?key|secret|password|passphrase|credentials?|(hub|auth|access|api|hf)_token)|token"
)


def environment() -> dict[str, Any]:
    """Return versions, host, command, commit and code hash of this process."""
    return {
        "host": socket.gethostname(),
        "platform": _platform(),
        **versions(),
        "command": _command(),
        "commit": _commit(),
        "code_sha256": code_hash(),
        "program_sha256": _program_hash(),
        "horovod_settings": _variables("HOROVOD_"),
        "nccl_settings": _variables("NCCL_"),
    }


def _program_hash() -> str | None:
    """Return the hash of the file that was started, which need not be of this package."""
    with contextlib.suppress(OSError):
        return hashlib.sha256(Path(sys.argv[0]).read_bytes()).hexdigest()
    return None


def _platform() -> str:
    """Return kernel, machine and C library in the format of platform.platform(), which would start `uname -p`."""
    kernel = os.uname()
    return "-".join((kernel.sysname, kernel.release, kernel.machine, "with", "".join(platform.libc_ver())))


def _variables(prefix: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(prefix) and not _SECRET.fullmatch(name)
    }


def _command() -> list[str]:
    """Return this process's command line, after the launcher's if it runs on the same host.

    The value of a secret, for example in mpirun -x TOKEN=VALUE, is replaced by "...".
    """
    command = sys.orig_argv
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            command_line = parent.cmdline()
            if len(command_line) > len(command) > 1 and command_line[1 - len(command) :] == command[1:]:
                command = command_line
    words = [word.encode(errors="backslashreplace").decode() for word in command]  # a path need not be UTF-8
    return [_without_secret(word, before) for before, word in pairwise(["", *words])]


def without_secrets(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings, texts whose names look like a secret replaced by "..."."""
    return {
        name: "..." if isinstance(value, str) and _SECRET_FIELD.fullmatch(name) else value
        for name, value in settings.items()
    }


def _without_secret(word: str, before: str) -> str:
    name, separator, _ = word.partition("=")
    if before.startswith("--") and _SECRET.fullmatch(before):
        return "..."
    return f"{name}=..." if separator and _SECRET.fullmatch(name) else word


def versions() -> dict[str, str | None]:
    """Return the versions of Python, and of packages and libraries that affect results; None if not installed."""
    return package_versions() | library_versions()


@cache
def package_versions() -> dict[str, str | None]:
    """Return the versions that are known before torch is imported."""
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "horovod", "mpi4py", "numpy", "tokenizers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = None
    return versions


def _commit() -> str | None:
    """Return the commit that the image was built from, or that is checked out; None if unknown."""
    if (image_commit := os.environ.get("HVDTRAIN_COMMIT")) is not None:
        return image_commit
    try:
        commit = _read_commit(Path(__file__).parents[3])
    except (OSError, UnicodeDecodeError):
        return None
    return commit if re.fullmatch("[0-9a-f]{40,64}", commit) else None


def _read_commit(folder: Path) -> str:
    """Read the commit from git's own files: git would be a child process, and after MPI_Init a fork is not safe."""
    git = folder / ".git"
    if git.is_file():  # of a worktree or a submodule
        git = folder / git.read_text().removeprefix("gitdir:").strip()
    head = (git / "HEAD").read_text().strip()
    branch = head.removeprefix("ref: ")
    if branch == head:
        return head
    common_file = git / "commondir"  # worktrees share their branches
    shared_git = git / common_file.read_text().strip() if common_file.exists() else git
    if (shared_git / branch).exists():
        return (shared_git / branch).read_text().strip()
    packed = (line.split(" ") for line in (shared_git / "packed-refs").read_text().splitlines())
    return next((commit for commit, *names in packed if names == [branch]), "")


@cache
def code_hash() -> str:
    """Return the SHA-256 over this package's source files."""
    package = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()


def read_plan(text: str | None) -> dict[str, Any] | None:
    """Decode HVDLAUNCH_PLAN, with all facts of each rank in `ranks`; None without a plan."""
    if text is None:
        return None
    plan: dict[str, Any] = json.loads(zlib.decompress(base64.b64decode(text)))
    ranks: list[dict[str, Any]] = []
    for host in plan.pop("hosts"):
        digits = host.pop("gpu_uuids", "")  # of NVIDIA's UUIDs, 32 per rank
        for local_rank, facts in enumerate(host.pop("ranks")):
            rank = {"rank": len(ranks), "local_rank": local_rank, **host, **facts}
            if digits:
                rank["gpu_uuid"] = f"GPU-{UUID(digits[32 * local_rank : 32 * local_rank + 32])}"
            ranks.append(rank)
    return {**plan, "ranks": ranks}
