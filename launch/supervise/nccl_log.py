"""NCCL's own logs: the transports between ranks, the rings, and the number of channels.

The formats are those of NCCL 2.4 to 2.28: src/graph/rings.cc, src/init.cc and src/transport of NVIDIA/nccl. If a run
has several communicators, the largest is used.
"""

import contextlib
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from launch.files import read_text

NAMES = "nccl.*.log"
OWN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW

END = r"(?: comm 0x.*)?$"  # of a line of RCCL
RANK = re.compile(r"\brank (\d+) n[rR]anks (\d+)\b")
VERSION = re.compile(r"CCL version (\S+)")
CHANNELS = re.compile(r"NCCL INFO (\d+) coll channels")
PLACE = re.compile(r"NCCL INFO Ring (\d+) : (\d+) -> (\d+) -> (\d+)" + END)
TREES = re.compile(r"NCCL INFO Trees (\[0\] .+)$")
# Logged by rank 0; truncated if the line is full. NCCL 2.4 logs no number of channels.
RING = re.compile(r"NCCL INFO Channel (\d+)(?:/(\d+))? :((?: +\d+)+)$")
WAY = re.compile(
    r"NCCL INFO (?:Channel|Ring) \d+(?:/\d+)? : (\d+)\S* -> (\d+)\S*(?: \[(?:send|receive)\])? via (.+?)" + END
)
WARNING = re.compile(r"(?:(\S+\.cc:\d+) )?NCCL WARN (.+)$")
MAX_WARNINGS = 5  # kinds


@dataclass(frozen=True, kw_only=True)
class Warned:
    """A kind of NCCL's warnings: texts that differ in numbers and addresses only."""

    text: str  # the first
    source: str  # the place in NCCL's sources; empty if not logged
    rank: int  # the first with this kind
    file: str  # its log
    count: int = 1

    @property
    def kind(self) -> str:
        """What is equal in all of them."""
        return re.sub(r"\S*\d\S*", "", self.text)


@dataclass(frozen=True, kw_only=True)
class RankLog:
    """The content of one rank's log."""

    rank: int
    ranks: int
    version: str | None
    channels: int  # 0 if not logged
    following: Mapping[int, int]  # channel -> the next rank in its ring
    rings: tuple[tuple[int, ...], ...]  # complete rings, logged by rank 0
    ways: Mapping[tuple[int, int], str]  # from, to -> P2P/CUMEM, SHM, NET/IB/GDRDMA, NET/Socket...
    warnings: tuple[Warned, ...]


@dataclass(frozen=True, kw_only=True)
class NcclLog:
    """The combined logs of all ranks."""

    version: str | None
    channels: int  # the minimum over ranks; 0 if not logged
    rings: tuple[tuple[int, ...], ...]  # one for each channel; empty if unknown
    ways: Mapping[tuple[int, int], str]
    missing: tuple[int, ...]  # ranks without a file
    warnings: tuple[Warned, ...]  # the most frequent kinds


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
    logs = []
    for file in sorted(folder.glob(NAMES)):
        try:
            log = read_rank(read_text(file), max_ranks=max_ranks, file=file.name)
        except (OSError, ValueError):
            continue
        logs += [] if log is None else [log]
    return merge_logs(logs)


def read_rank(text: str, *, max_ranks: int, file: str = "its log") -> RankLog | None:
    """Parse one rank's log; None without a communicator that a run of `max_ranks` can have."""
    lines = [line.rstrip() for line in text.splitlines()]
    found_sizes = [(int(match[2]), int(match[1])) for line in lines if (match := RANK.search(line))]
    sizes = [(ranks, rank) for ranks, rank in found_sizes if rank < ranks <= max_ranks]
    if not sizes:
        return None
    ranks, rank = max(sizes)
    places = [match for line in lines if (match := PLACE.search(line)) and int(match[3]) == rank]
    lists = [match for line in lines if (match := RING.search(line))]
    rings = {int(match[1]): tuple(map(int, match[3].split())) for match in lists}
    counts = [int(match[1]) for line in lines if (match := CHANNELS.search(line))]
    counts += [int(match[2] or len(rings)) for match in lists]
    counts = counts or [match[1].count("[") for line in lines if (match := TREES.search(line))]
    ways = [match for line in lines if (match := WAY.search(line))]
    warnings = [match for line in lines if (match := WARNING.search(line))]
    versions = [match[1] for line in lines if (match := VERSION.search(line))]
    return RankLog(
        rank=rank,
        ranks=ranks,
        version=versions[0] if versions else None,
        channels=max(counts, default=0),
        following={int(match[1]): int(match[4]) for match in places},
        rings=tuple(ring for _, ring in sorted(rings.items()) if sorted(ring) == list(range(ranks))),
        ways={(int(match[1]), int(match[2])): way_of(match[3]) for match in ways},
        warnings=tuple(Warned(text=match[2], source=match[1] or "", rank=rank, file=file) for match in warnings),
    )


def way_of(via: str) -> str:
    """Return a transport without instance details: NET/IB/3(2)/GDRDMA/Shared becomes NET/IB/GDRDMA."""
    kind, *rest = via.split("/")
    if kind in ("direct shared memory", "direct"):  # up to NCCL 2.7
        return "SHM"
    if kind == "NET":
        return "/".join([kind, *(part for part in rest if not re.fullmatch(r"\d+(\(\d+\))?|Shared", part))])
    return "/".join([kind, *rest[:1]]) if kind == "P2P" else kind


def merge_logs(logs: Iterable[RankLog]) -> NcclLog | None:
    """Merge the logs of all ranks; None if there are none."""
    by_rank = {log.rank: log for log in sorted(logs, key=lambda log: log.ranks)}
    if not by_rank:
        return None
    ranks = max(log.ranks for log in by_rank.values())
    by_rank = {rank: log for rank, log in by_rank.items() if log.ranks == ranks}
    first = next(iter(by_rank.values()))
    whole = by_rank[0].rings if 0 in by_rank else ()
    followed = _followed(by_rank, ranks)
    return NcclLog(
        version=first.version,
        channels=min((log.channels for log in by_rank.values() if log.channels), default=len(followed)),
        rings=whole if len(whole) > len(followed) else followed,
        ways={pair: way for _, log in sorted(by_rank.items()) for pair, way in log.ways.items()},
        missing=tuple(rank for rank in range(ranks) if rank not in by_rank),
        warnings=_most_frequent(warned for _, log in sorted(by_rank.items()) for warned in log.warnings),
    )


def _most_frequent(warnings: Iterable[Warned]) -> tuple[Warned, ...]:
    """Return the first warning of each of the most frequent kinds, with its count."""
    kinds: dict[str, list[Warned]] = {}
    for warned in warnings:
        kinds.setdefault(warned.kind, []).append(warned)
    counted = [replace(alike[0], count=len(alike)) for alike in kinds.values()]
    return tuple(sorted(counted, key=lambda warned: -warned.count)[:MAX_WARNINGS])


def _followed(by_rank: Mapping[int, RankLog], ranks: int) -> tuple[tuple[int, ...], ...]:
    """Return the rings by following each rank's next rank; rings that do not pass through all ranks are left out."""
    rings = []
    for channel in sorted(set[int]().union(*(log.following for log in by_rank.values()))):
        ring = [0]
        while len(ring) < ranks and ring[-1] in by_rank and channel in by_rank[ring[-1]].following:
            ring.append(by_rank[ring[-1]].following[channel])
        if sorted(ring) == list(range(ranks)):
            rings.append(tuple(ring))
    return tuple(rings)
