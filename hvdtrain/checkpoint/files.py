"""Checkpoints on disk: written atomically, and verified before they are loaded.

step-000000012/        state.pt, the shared state; ranks/3.pt, the state of rank 3, which writes it itself;
                       manifest.json with their sizes and SHA-256, written last
best-000000008/        weights.pt and manifest.json, kept separately from the steps
.step-000000012.part/  unfinished: being written, or left by a process that was killed
.step-000000012.old/   the previous checkpoint of this step, while it is being replaced
"""

import contextlib
import errno
import hashlib
import io
import json
import os
import re
import shutil
import stat
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint

from hvdtrain.ranks.agree import agree
from hvdtrain.ranks.comm import Comm, SerialComm
from hvdtrain.settings.safety.exits import BadInput
from hvdtrain.settings.safety.files import read_file
from hvdtrain.settings.safety.guard import is_out_of_memory
from hvdtrain.settings.safety.unpickled import refuse_other_users

FORMAT = 3
MANIFEST = "manifest.json"
_RANKS = "ranks"
_MOST_MANIFEST_BYTES = 2**24  # 150 bytes per rank
_DOCUMENT = re.compile(r"([A-Za-z0-9_-]+|ranks/(0|[1-9][0-9]{0,8}))\.pt")
_ALONE: Comm = SerialComm()

Document = Any  # tensors, numbers, strings and None, in lists, tuples and dicts


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Size and hash of a file, from the manifest."""

    size: int  # bytes
    sha256: str  # hexadecimal


@dataclass(frozen=True, kw_only=True)
class StoredCheckpoint:
    """A checkpoint with a valid manifest."""

    folder: Path
    step: int
    metadata: dict[str, Any]  # as passed to `commit`
    files: dict[str, Fingerprint]  # by file name, relative to the folder

    @property
    def ranks(self) -> list[int]:
        """The ranks with files in the checkpoint."""
        return sorted(int(Path(name).stem) for name in self.files if name.startswith(f"{_RANKS}/"))

    def is_complete_for(self, size: int) -> bool:
        """Return whether each of `size` ranks has a file in the checkpoint."""
        return self.metadata.get("np", size) == size and self.ranks == list(range(size))


def part_folder(root: Path, step: int, *, kind: str = "step") -> Path:
    """Return the folder of a checkpoint that is being written."""
    return root / f".{kind}-{step:09d}.part"


def rank_file_name(rank: int) -> str:
    """Return the name of a rank's document."""
    return f"{_RANKS}/{rank}"


def begin(root: Path, step: int, *, kind: str = "step") -> Path:
    """Create the folder of a new checkpoint, and remove unfinished ones. Raises OSError."""
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    clean(root)
    part = part_folder(root, step, kind=kind)
    with contextlib.ExitStack() as undo:
        part.mkdir(mode=0o700)
        undo.callback(discard, part)
        if kind == "step":
            (part / _RANKS).mkdir(mode=0o700)
        undo.pop_all()
    return part


def discard(part: Path) -> None:
    """Remove an unfinished checkpoint; what cannot be removed now is left to the next call of `begin`."""
    with contextlib.suppress(OSError):
        shutil.rmtree(part, ignore_errors=True)


def write_rank_file(part: Path, rank: int, content: memoryview) -> Fingerprint:
    """Write a rank's packed document into an unfinished checkpoint, and sync it to disk. Raises OSError."""
    _write_file(part / f"{rank_file_name(rank)}.pt", content)
    return _fingerprint(content)


def commit(
    part: Path,
    documents: Mapping[str, Document],
    *,
    metadata: Mapping[str, Any],
    ranks: Mapping[int, Fingerprint],
) -> Path:
    """Complete an unfinished checkpoint, and return its folder.

    Each document becomes <name>.pt, and `metadata` becomes JSON in the manifest; `ranks` have already written their
    files. A checkpoint of the same step is replaced. Raises OSError, and then nothing has changed; TypeError for a
    document that could not be loaded again.
    """
    root, name = part.parent, part.name[1 : -len(".part")]
    folder, old = root / name, root / f".{name}.old"
    contents = {f"{name}.pt": pack(name, document) for name, document in documents.items()}
    files = {name: _fingerprint(content) for name, content in contents.items()}
    files |= {f"{rank_file_name(rank)}.pt": fingerprint for rank, fingerprint in ranks.items()}
    contents[MANIFEST] = _manifest(int(name[-9:]), metadata, files)
    _require_room(root, contents)
    with contextlib.ExitStack() as undo:
        for name, content in contents.items():
            undo.callback((part / name).unlink, missing_ok=True)
            _write_file(part / name, content)
        if ranks:
            _fsync(part / _RANKS)
        _fsync(part)
        if os.path.lexists(folder):
            folder.rename(old)
            undo.callback(old.rename, folder)
        part.rename(folder)
        undo.callback(folder.rename, part)
        _fsync(root)
        undo.pop_all()
    with contextlib.suppress(OSError):  # `clean` removes it later
        remove(old)
    return folder


def write(
    root: Path, step: int, documents: Mapping[str, Document], *, metadata: Mapping[str, Any], kind: str = "step"
) -> Path:
    """Write a complete checkpoint from a single process; if an exception is raised, nothing has changed."""
    part = begin(root, step, kind=kind)
    try:
        return commit(part, documents, metadata=metadata, ranks={})
    except BaseException:
        discard(part)
        raise


def pack(name: str, document: Document, *, is_checked: bool = False) -> memoryview:
    """Serialize a document; TypeError if it could not be loaded again, unless an earlier one like it was checked."""
    assert _DOCUMENT.fullmatch(f"{name}.pt")
    packed = io.BytesIO()
    torch.save(document, packed)
    packed.seek(0)
    if not is_checked and (refused := get_unsafe_globals_in_checkpoint(packed)):
        raise TypeError(f"document {name} holds {sorted(refused)}, which could not be loaded again")
    return packed.getbuffer()


def _fingerprint(content: bytes | memoryview) -> Fingerprint:
    return Fingerprint(size=len(content), sha256=hashlib.sha256(content).hexdigest())


def _manifest(step: int, metadata: Mapping[str, Any], files: Mapping[str, Fingerprint]) -> memoryview:
    plain_files = {name: asdict(fingerprint) for name, fingerprint in files.items()}
    plain_metadata = json.loads(json.dumps(dict(metadata)))  # as it will be read: JSON keys are strings
    content = _seal({"format": FORMAT, "step": step, "about": plain_metadata, "files": plain_files})
    assert len(content) <= _MOST_MANIFEST_BYTES
    return memoryview(content)


def _seal(manifest: Mapping[str, Any]) -> bytes:
    """Serialize the manifest in a canonical form with its own SHA-256, which detects any flipped bit."""
    plain = json.dumps(manifest, sort_keys=True)
    digest = hashlib.sha256(plain.encode()).hexdigest()
    return (json.dumps({**manifest, "sha256": digest}, sort_keys=True, indent=2) + "\n").encode()


def _require_room(root: Path, contents: Mapping[str, memoryview]) -> None:
    needed = sum(len(content) for content in contents.values())
    free = shutil.disk_usage(root).free
    if free < needed:
        reason = f"{os.strerror(errno.ENOSPC)}, {needed / 1e6:.1f} MB needed and {free / 1e6:.1f} MB free"
        raise OSError(errno.ENOSPC, reason, str(root))


def _write_file(path: Path, content: memoryview) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        while content:
            content = content[os.write(descriptor, content) :]
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_full(error: OSError) -> bool:
    """Return whether a write has failed since the disk is full, or the user's share of it."""
    return error.errno in {errno.ENOSPC, errno.EDQUOT}


def remove(path: Path) -> None:
    """Remove a file, a link, or a folder with its content, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def clean(root: Path) -> None:
    """Remove unfinished checkpoints from `root`, and restore those that were about to be replaced.

    Call it before `find_newest`, while no other process writes to `root`.
    """
    for part in root.glob(".*-*.part"):
        remove(part)
    for old in root.glob(".*-*.old"):
        folder = root / old.name[1 : -len(".old")]
        if folder.exists():
            remove(old)
        else:
            old.rename(folder)


def list_checkpoints(root: Path, kind: str) -> list[tuple[int, Path]]:
    """Return step and folder of each checkpoint of this kind (step or best), oldest first."""
    matches = [(re.fullmatch(rf"{kind}-(\d{{9}})", path.name), path) for path in root.glob(f"{kind}-*")]
    return sorted((int(match[1]), path) for match, path in matches if match)


def can_resume(root: Path, step: int) -> bool:
    """Return whether a run can resume from this step: it needs this whole checkpoint, and no other file."""
    with contextlib.suppress(BadInput, OSError):
        checkpoint = open_one(root / f"step-{step:09d}")
        sizes = {name: (checkpoint.folder / name).lstat().st_size for name in checkpoint.files}
        return all(sizes[name] == expected.size for name, expected in checkpoint.files.items())
    return False


def find_newest(
    root: Path, comm: Comm = _ALONE, only: int | None = None, *, apart: Collection[int] = ()
) -> tuple[StoredCheckpoint | None, list[str]]:
    """Return the newest undamaged checkpoint in rank 0's `root`, and why newer ones were skipped; equal on all ranks.

    With `only` that of this step.

    Each rank verifies its own file, and rank 0 the shared files and those of the ranks that are `apart`, which do not
    see `root`. If the number of ranks has changed, rank 0 verifies all files.
    """
    skipped = list[str]()
    saved = [folder.name for step, folder in reversed(list_checkpoints(root, "step")) if only in (None, step)]
    for name in comm.allgather(saved)[0]:
        try:
            return _open_on_all(root / name, comm, apart), skipped
        except BadInput as error:
            skipped.append(str(error))
    return None, skipped


def _open_on_all(folder: Path, comm: Comm, apart: Collection[int]) -> StoredCheckpoint:
    manifest = agree(comm, lambda: _read_manifest(folder) if comm.rank == 0 else b"")
    checkpoint = _parse_manifest(folder, comm.broadcast(manifest))
    agree(comm, lambda: [_read_verified(checkpoint, file) for file in _files_to_check(checkpoint, comm, apart)])
    return checkpoint


def _files_to_check(checkpoint: StoredCheckpoint, comm: Comm, apart: Collection[int]) -> list[str]:
    if comm.rank == 0:
        others = {f"{rank_file_name(rank)}.pt" for rank in range(1, comm.size) if rank not in apart}
        return [name for name in checkpoint.files if not (checkpoint.is_complete_for(comm.size) and name in others)]
    is_own = checkpoint.is_complete_for(comm.size) and comm.rank not in apart
    return [f"{rank_file_name(comm.rank)}.pt"] if is_own else []


def load(checkpoint: StoredCheckpoint, name: str) -> Document:
    """Load the document of this name; its bytes are verified before unpickling, and it cannot run code.

    Raises BadInput if it is damaged, or holds anything except tensors, numbers, strings, lists and dicts.
    """
    return unpack(checkpoint, name, read(checkpoint, name))


def read(checkpoint: StoredCheckpoint, name: str) -> bytes:
    """Return the verified bytes of a document; BadInput if they are damaged."""
    try:
        return _read_verified(checkpoint, f"{name}.pt")
    except BadInput as error:
        raise BadInput(f"{error}. {_describe_remedy(checkpoint.folder)}") from error


def unpack(checkpoint: StoredCheckpoint, name: str, content: bytes) -> Document:
    """Deserialize a document, with tensors on the CPU; BadInput if it holds anything that `load` does not allow."""
    try:
        refuse_other_users(checkpoint.folder)
        packed = io.BytesIO(content)
        if refused := get_unsafe_globals_in_checkpoint(packed):
            raise BadInput(f"it names {sorted(refused)}")
        packed.seek(0)
        return torch.load(packed, map_location="cpu", weights_only=True)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        # torch's message recommends unpickling anything
        reason = str(error) if isinstance(error, BadInput | ValueError) else type(error).__name__
        raise BadInput(
            f"{checkpoint.folder / name}.pt: rejected ({reason}). {_describe_remedy(checkpoint.folder)}"
        ) from error


def _describe_remedy(folder: Path) -> str:
    return f"Remove {folder} to resume from the checkpoint before it, or choose another --run."


def open_one(folder: Path) -> StoredCheckpoint:
    """Open the checkpoint that a manifest describes. The manifest is untrusted; BadInput names the problem."""
    return _parse_manifest(folder, _read_manifest(folder))


def _read_manifest(folder: Path) -> bytes:
    for directory in (folder, folder / _RANKS):
        if directory.is_symlink():
            raise BadInput(f"{directory} is a symbolic link")
    return _read_file(folder / MANIFEST, largest=_MOST_MANIFEST_BYTES)


def _parse_manifest(folder: Path, content: bytes) -> StoredCheckpoint:
    path = folder / MANIFEST
    try:
        manifest = json.loads(content)
        del manifest["sha256"]
        if _seal(manifest) != content:
            raise BadInput(f"{path} is damaged: its own SHA-256 does not match")
        if manifest["format"] != FORMAT:
            raise BadInput(f"{path} has format {manifest['format']!r}: only {FORMAT} is supported")
        files = {
            name: Fingerprint(size=int(entry["size"]), sha256=str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
        checkpoint = StoredCheckpoint(
            folder=folder, step=int(folder.name[-9:]), metadata=dict(manifest["about"]), files=files
        )
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise BadInput(f"{path} is damaged: not a manifest ({type(error).__name__})") from error
    if manifest["step"] != checkpoint.step:
        raise BadInput(f"{path} is of step {manifest['step']!r}")
    if unknown := [name for name in checkpoint.files if not _DOCUMENT.fullmatch(name)]:
        raise BadInput(f"{path} names {unknown[0]!r}: not a file of a checkpoint")
    return checkpoint


def _read_verified(checkpoint: StoredCheckpoint, name: str) -> bytes:
    if name not in checkpoint.files:
        raise BadInput(f"{checkpoint.folder} has no {name}")
    path, expected = checkpoint.folder / name, checkpoint.files[name]
    content = _read_file(path, largest=expected.size)
    if len(content) != expected.size:
        raise BadInput(f"{path} is damaged: {len(content)} bytes instead of {expected.size}")
    if hashlib.sha256(content).hexdigest() != expected.sha256:
        raise BadInput(f"{path} is damaged: its SHA-256 differs from the manifest's")
    return content


def _read_file(path: Path, *, largest: int) -> bytes:
    try:
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{path} is not a regular file")
        if status.st_size > largest:
            raise BadInput(f"{path} has {status.st_size} bytes, more than {largest}")
        return read_file(path, largest=largest)
    except OSError as error:
        raise BadInput(f"{path} cannot be read ({error.strerror})") from error
