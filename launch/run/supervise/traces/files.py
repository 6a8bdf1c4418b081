"""The files that the ranks of hvdtrain have left in the run folder, also on hosts that do not share it.

A rank leaves its errors in `ranks/rank-<r>.err`, its last collectives in `ranks/rank-<r>.calls`, and its place in
`ranks/rank-<r>.at`, a single line such as "step 17 working", "step 17 reading" while it reads its data, or "step 17
waiting" inside a collective.

python -m launch.run.supervise.traces.files FOLDER RANK...   prints the files of these ranks here, as one line of JSON
"""

import base64
import contextlib
import itertools
import json
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.documents import Document, parse
from launch.errors import LaunchError
from launch.files import MAX_MIB, open_regular
from launch.hosts.probe import at_once, is_local
from launch.placement.slots import RankSlot
from launch.run.supervise.rank_logs import ANSWER_S, Logs
from launch.run.supervise.traces.calls import compare, is_library, parse_calls
from launch.run.supervise.traces.flight import parse_dump

AT = re.compile(r"(?:step (?P<step>\d+)|start) (?P<doing>[a-z]+)\s*")
STACK = "(most recent call first):"  # written by faulthandler
FRAME = re.compile(r'\s*File "(?P<file>.+)", line (?P<line>\d+)')
FILES = ("rank-{}.err", "rank-{}.at", "rank-{}.calls", "torch-calls-{}")
MARK = "hvdlaunch-traces "


@dataclass(frozen=True, kw_only=True)
class Trace:
    """The files that a rank has left in the run folder."""

    at: str | None  # "at step 17"; None if unknown
    step: str | None = None  # 17; None before the first, or if unknown
    waited: bool  # whether it waited for other ranks, inside a collective
    read: bool  # whether it was reading its data
    words: str  # content of that file; may be empty
    file: Path  # its error file, or else its log
    calls: bytes = b""  # its last collectives

    def stack(self) -> list[str] | None:
        """Return the frames of the main thread, the newest first; None without a stack."""
        lines = self.words.splitlines()
        stacks = [number for number, text in enumerate(lines) if text.endswith(STACK)]
        if not stacks:
            return None
        # The main thread's stack is the last; a crash marks its own.
        first = next((number for number in stacks if lines[number].startswith("Current thread")), stacks[-1])
        return list(itertools.takewhile(str.strip, lines[first + 1 :]))


def read_traces(folder: Path, ranks: Iterable[int]) -> dict[int, Trace]:
    """Read what the ranks have left in the folder, by rank; ranks without files are missing."""
    return _traces(folder, {rank: _files(folder, rank, FILES[:2]) for rank in ranks})


def gather_traces(folder: Path, slots: Sequence[RankSlot], logs: Logs | None) -> dict[int, Trace]:
    """Read the same with the calls, and from each host that does not share the folder, if `logs` says how."""
    return _traces(folder, _gather(folder, slots, logs))


def in_torch_calls(slots: Sequence[RankSlot], logs: Logs, *, is_likely: bool) -> str | None:
    """Describe in which calls of torch.distributed the ranks are; None if torch has dumped none.

    Reads other hosts only if a time-out `is_likely`.
    """
    dumps = {rank: files[-1] for rank, files in _gather(logs.folder, slots, logs if is_likely else None).items()}
    return compare({rank: calls for rank, dump in dumps.items() if (calls := parse_dump(dump))}, of="torch.distributed")


def _gather(folder: Path, slots: Sequence[RankSlot], logs: Logs | None) -> dict[int, list[bytes]]:
    files = {slot.rank: _files(folder, slot.rank, FILES) for slot in slots}
    away: dict[str, list[int]] = {}
    for slot in slots:
        if not any(files[slot.rank]) and not is_local(slot.host):
            away.setdefault(slot.host, []).append(slot.rank)

    def ask(host: str) -> dict[int, list[bytes]]:
        assert logs is not None
        words = [logs.python, "-P", "-m", "launch.run.supervise.traces.files", str(folder), *map(str, away[host])]
        try:
            answer = Document(parse(logs.ssh.ask(host, words, str(Path.cwd()), mark=MARK, timeout_s=ANSWER_S)))
            packed = {rank: zip(FILES, answer.list(str(rank)), strict=True) for rank in away[host]}
            return {rank: [_unpacked(text) for _, text in files] for rank, files in packed.items()}
        except (LaunchError, ValueError):
            return {}

    for answer in at_once(ask, list(away)).values() if logs is not None else ():
        files |= answer
    return files


def in_calls(traces: Mapping[int, Trace]) -> str | None:
    """Describe in which calls the ranks are; None if that is unknown."""
    outside = {}
    for rank, trace in traces.items():
        frames = filter(None, map(FRAME.match, trace.stack() or ()))
        if (own := next((frame for frame in frames if not is_library(frame["file"])), None)) is not None:
            outside[rank] = f"{Path(own['file']).name}:{own['line']}"
    return compare(
        {rank: groups for rank, trace in traces.items() if (groups := parse_calls(trace.calls))},
        steps={rank: f"of step {trace.step}" for rank, trace in traces.items() if trace.step is not None},
        outside=outside,
    )


def _files(folder: Path, rank: int, names: Iterable[str]) -> list[bytes]:
    return [_content(folder / name.format(rank)) for name in names]


def _traces(folder: Path, files: Mapping[int, Sequence[bytes]]) -> dict[int, Trace]:
    traces = {}
    for rank, (errors, place, *others) in files.items():
        words, at = errors.decode(errors="replace").strip(), AT.match(place.decode(errors="replace"))
        if words or at:
            traces[rank] = Trace(
                at=None if at is None else _place(at),
                step=None if at is None else at["step"],
                waited=at is not None and at["doing"] == "waiting",
                read=at is not None and at["doing"] == "reading",
                words=words,
                file=folder / f"rank-{rank}.err",
                calls=others[0] if others else b"",
            )
    return traces


def _place(at: re.Match[str]) -> str:
    doing = "" if at["doing"] in ("working", "waiting", "left") else f" while {at['doing']}"
    return ("at the start" if at["step"] is None else f"at step {at['step']}") + doing


def _content(file: Path) -> bytes:
    with contextlib.suppress(OSError), open_regular(file) as stream:
        return stream.read(MAX_MIB << 20)
    return b""


def _packed(content: bytes) -> str:
    return base64.b64encode(zlib.compress(content)).decode()


def _unpacked(text: object) -> bytes:
    """Return the content, at most MAX_MIB of it; ValueError if it is not packed."""
    try:
        return zlib.decompressobj().decompress(base64.b64decode(str(text)), MAX_MIB << 20)
    except zlib.error as error:
        raise ValueError(str(error)) from None


if __name__ == "__main__":
    folder, *ranks = sys.argv[1:]
    left = {rank: list(map(_packed, _files(Path(folder), int(rank), FILES))) for rank in ranks}
    print(f"{MARK}{json.dumps(left)}", flush=True)
