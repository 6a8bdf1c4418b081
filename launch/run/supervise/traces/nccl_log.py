"""NCCL's own logs, a file for each rank: the transports between ranks, the rings, the channels, and warnings.

The formats are those of NCCL 2.12 to 2.30: src/graph/rings.cc, src/init.cc and src/transport of NVIDIA/nccl. If a run
has several communicators, the largest is used.
"""

import contextlib
import os
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from launch.files import MAX_MIB, open_regular

NAMES = "nccl.*.log"
OWN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

RANK = re.compile(r"\brank (\d{1,9}) n[rR]anks (\d{1,9})\b")
VERSION = re.compile(r"NCCL version (\S+)")
CHANNELS = re.compile(r"NCCL INFO (\d{1,9}) coll channels")
PLACE = re.compile(r"NCCL INFO Ring (\d{1,9}) : (\d{1,9}) -> (\d{1,9}) -> (\d{1,9})\s*$", re.MULTILINE)
WAY = re.compile(
    r"NCCL INFO Channel \d+(?:/\d+)? : (\d{1,9})\S* -> (\d{1,9})\S*(?: \[(?:send|receive)\])? via (.+?)\s*$",
    re.MULTILINE,
)
WARNING = re.compile(r"(?:(\S+\.cc:\d+) (?:\(\w+\) )?)?NCCL WARN (.+?)\s*$", re.MULTILINE)
MAX_WARNINGS = 5  # kinds


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """The logs of all ranks."""

    version: str | None
    channels: int  # the minimum over ranks; 0 if not logged
    rings: tuple[tuple[int, ...], ...]  # those that the logs show completely
    ways: Mapping[tuple[int, int], str]  # from, to -> P2P/CUMEM, SHM, NET/IB/GDRDMA, NET/Socket...
    missing: tuple[int, ...]  # ranks without a file
    # The most frequent kinds of warnings, each of texts that differ in numbers and addresses only: the first rank, its
    # log, the first text with its place in NCCL's sources, and the count.
    warnings: tuple[tuple[int, str, str, int], ...]


def new_folder(folder: Path) -> None:
    """Create logs/JOB if it is missing, readable only for this user; remove NCCL logs of earlier runs of the job.

    Links are not followed. Raises OSError.
    """
    at = os.open(folder.parent.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        for name in folder.parts[-2:]:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=at)
            inner = os.open(name, OWN_FOLDER, dir_fd=at)
            os.close(at)
            at = inner
        for name in os.listdir(at):  # noqa: PTH208
            if fnmatch(name, NAMES):
                os.unlink(name, dir_fd=at)
    finally:
        os.close(at)


def read_folder(folder: Path, *, max_ranks: int) -> NcclLog | None:
    """Read the logs of a run with `max_ranks` ranks from a folder; None if there are none."""
    texts = {}
    for file in sorted(folder.glob(NAMES)):
        with contextlib.suppress(OSError), open_regular(file) as stream:  # with the user's NCCL_DEBUG_SUBSYS it is long
            texts[file.name] = stream.read(MAX_MIB << 20).decode(errors="replace")
    return read_logs(texts, max_ranks=max_ranks)


def read_logs(texts: Mapping[str, str], *, max_ranks: int) -> NcclLog | None:
    """Parse the logs by file name; None without a communicator that a run of `max_ranks` can have."""
    files: dict[int, str] = {}  # rank -> file
    size = 0
    for file, text in texts.items():
        pairs = [(int(ranks), int(rank)) for rank, ranks in RANK.findall(text)]
        ranks, rank = max(((ranks, rank) for ranks, rank in pairs if rank < ranks <= max_ranks), default=(0, 0))
        if ranks > size:
            files, size = {}, ranks
        if ranks == size > 0:
            files[rank] = file
    if not files:
        return None
    whole = {rank: texts[file] for rank, file in sorted(files.items())}
    logs = {rank: _of_communicator(text, size) for rank, text in whole.items()}
    following = {
        (int(channel), rank): int(after)
        for rank, text in logs.items()
        for channel, before, own, after in PLACE.findall(text)
        if int(own) == rank
    }
    rings = _rings(following, size)
    counts = [max(map(int, found)) for text in logs.values() if (found := CHANNELS.findall(text))]
    versions = [match[1] for text in whole.values() if (match := VERSION.search(text))]
    firsts: dict[str, tuple[int, str, str]] = {}
    kinds = Counter[str]()
    for rank, text in whole.items():
        for source, warning in WARNING.findall(text):
            kind = re.sub(r"\S*\d\S*", "", warning)
            kinds[kind] += 1
            firsts.setdefault(kind, (rank, files[rank], f"{warning} ({source})" if source else warning))
    # NCCL may connect ranks at their first call, after it has made smaller communicators.
    ways = [way for text in logs.values() for way in WAY.findall(text)] or WAY.findall("\n".join(whole.values()))
    return NcclLog(
        version=versions[0] if versions else None,
        channels=min(counts, default=len(rings)),
        rings=rings,
        ways={(int(a), int(b)): way_of(via) for a, b, via in ways},
        missing=tuple(rank for rank in range(size) if rank not in logs),
        warnings=tuple((*firsts[kind], count) for kind, count in kinds.most_common(MAX_WARNINGS)),
    )


def _of_communicator(text: str, size: int) -> str:
    """Return the lines about the first communicator of this size, up to the next of another size."""
    found = list(RANK.finditer(text))
    start = next(match.start() for match in found if int(match[2]) == size)
    return text[
        start : next((match.start() for match in found if match.start() > start and int(match[2]) != size), None)
    ]


def way_of(via: str) -> str:
    """Return a transport without instance details: NET/IB/3(2)/GDRDMA/Shared becomes NET/IB/GDRDMA."""
    kind, *rest = via.split("/")
    if kind == "NET":
        return "/".join([kind, *(part for part in rest if not re.fullmatch(r"\d+(\(\d+\))?|Shared", part))])
    return "/".join([kind, *rest[:1]]) if kind == "P2P" else kind


def _rings(following: Mapping[tuple[int, int], int], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the rings by following each rank's next rank; rings that do not pass through all ranks are left out."""
    rings = []
    for channel in sorted({channel for channel, _ in following}):
        ring = [0]
        while len(ring) < ranks and (channel, ring[-1]) in following:
            ring.append(following[channel, ring[-1]])
        if sorted(ring) == list(range(ranks)):
            rings.append(tuple(ring))
    return tuple(rings)
