"""What a process runs on: versions, host, command, commit, and a hash of the code."""

import contextlib
import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

# Names of variables and options whose values are not written down.
_SECRET = re.compile(r"[\w-]*(TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|KEY)[\w-]*", re.IGNORECASE)


def environment() -> dict[str, Any]:
    """Versions, host, command and commit of this process."""
    return {
        "host": socket.gethostname(),
        "platform": platform.platform(),
        **versions(),
        "command": _command(),
        "commit": _commit(),
        "horovod_settings": _variables("HOROVOD_"),
        "nccl_settings": _variables("NCCL_"),
    }


def _variables(prefix: str) -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if name.startswith(prefix) and not _SECRET.fullmatch(name)
    }


def _command() -> list[str]:
    """This process's words, with those of the launcher before them where it is on the same host.

    In place of a secret's value, as in mpirun -x TOKEN=VALUE, stands "...".
    """
    command = sys.orig_argv
    with contextlib.suppress(psutil.Error):
        for parent in psutil.Process().parents():
            words = parent.cmdline()
            if len(words) > len(command) > 1 and words[1 - len(command) :] == command[1:]:
                command = words
    return [_without_secret(word) for word in command]


def _without_secret(word: str) -> str:
    name, with_value, _ = word.partition("=")
    return f"{name}=..." if with_value and _SECRET.fullmatch(name) else word


def versions() -> dict[str, str | None]:
    """Python and the packages whose version changes a result; None for one that is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "torchvision", "horovod", "mpi4py", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def _commit() -> str | None:
    """The commit that the image was built from, or git's answer; None where there is neither."""
    if (built := os.environ.get("HVDTRAIN_COMMIT")) is not None:
        return built
    where = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(where), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def code_hash() -> str:
    """SHA-256 over this package's source files."""
    package = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(str(path.relative_to(package)).encode() + path.read_bytes())
    return digest.hexdigest()
