"""The newest states of a run in memory that survives its ranks: hvdlaunch, on rank 0's host, has a file without a name.

After a header the file has one or two copies of the state, each with an area for every rank: its step, a text with all
values except tensors, and the tensors. A rank marks its area as torn before it writes, and with the step afterwards. A
copy is used only if all its areas are of one step. What is equal on all ranks is copied by those of this host in turn;
ranks on other hosts send rank 0 what differs.
"""

import io
import json
import math
import mmap
import os
import statistics
import struct
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, cycle, pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from hvdtrain.checkpoint import files
from hvdtrain.checkpoint.files import Document
from hvdtrain.core.task import added
from hvdtrain.ranks.comm import Comm
from hvdtrain.settings.launched import fact
from hvdtrain.settings.safety.exits import print_message
from hvdtrain.settings.safety.guard import is_out_of_memory
from hvdtrain.settings.safety.limits import free_memory_bytes

SHARE = 0.01  # of the time, for copies
COPIES = (2, 1)  # with one copy there is none while it is written
MOST_OF_FREE = 0.5
TORN = -1
_HEADER_BYTES = 1 << 16
_PAGE = mmap.PAGESIZE
_ALIGNED = 64  # bytes
_STATE = struct.Struct("<qqq")  # of an area: step or TORN, bytes of the text, where the tensors begin
_TENSOR = "\0tensor"  # in the text, instead of each tensor


def open_on_all(comm: Comm) -> "Snapshots | None":
    """Return the snapshots of a run that hvdlaunch restarts; None if rank 0 cannot open the file."""
    file = open_file()
    apart = [rank for rank, is_open in enumerate(comm.allgather(file is not None)) if not is_open]
    return None if 0 in apart else Snapshots(comm, file, apart)


def open_file() -> int | None:
    """Open hvdlaunch's file for snapshots; None without one, for example on another host."""
    try:
        pid, number, name = fact(os.environ, "snapshots", "").split()
        path = f"/proc/{int(pid)}/fd/{int(number)}"
        if os.readlink(path) == f"/memfd:{name} (deleted)":  # noqa: PTH115
            return os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except (ValueError, OSError):
        pass
    return None


@dataclass(frozen=True, kw_only=True)
class _Area:
    """A rank's part of a copy, in its memory."""

    memory: mmap.mmap
    text_room: int  # bytes
    tensors: list[Tensor]  # that lie in the memory

    def write(self, step: int, text: memoryview, tensors: list[Tensor]) -> None:
        _STATE.pack_into(self.memory, 0, TORN, 0, 0)
        if tensors:
            with torch.no_grad():
                torch._foreach_copy_(self.tensors, tensors)
        self.memory[_STATE.size : _STATE.size + len(text)] = bytes(text)
        _STATE.pack_into(self.memory, 0, step, len(text), self.text_room)


class Snapshots:
    """Takes snapshots of a run whose rank 0 can open hvdlaunch's file; `take` is a collective."""

    def __init__(self, comm: Comm, file: int | None, apart: Collection[int] = ()) -> None:
        """Use this open file; ranks that are `apart` have none."""
        self._comm, self._file, self._apart = comm, file, apart
        here = [rank for rank in range(comm.size) if rank not in apart]
        self._turns = here + here[1:]  # of ranks to copy a tensor: rank 0 has more to do besides
        self._areas: list[dict[int, _Area]] = []  # of each copy those that this rank writes, by rank
        self._text_room = 0  # bytes
        self._kinds: list[tuple[Any, ...]] = []  # of the tensors
        self._count, self._is_on, self._due_at_s = 0, True, 0.0
        self._stepped_at_s = math.inf
        self._costs_s = deque[float](maxlen=5)

    def is_due(self) -> bool:
        """Return whether rank 0 requests a snapshot after this step: the last ones cost at most SHARE of the time."""
        now = time.monotonic()
        step_s, self._stepped_at_s = now - self._stepped_at_s, now
        return self._is_on and now + step_s >= self._due_at_s

    def take(self, step: int, documents: Callable[[], tuple[dict[str, Document], Document]]) -> bool:
        """Copy the documents into the memory; return whether it has room, else for none later.

        The first ones are this rank's. The last one is equal on all ranks: those on rank 0's host copy its tensors in
        turn.
        """
        if not self._is_on:
            return False
        # A copy from a GPU waits and computes nothing.
        clock = time.perf_counter if torch.cuda.is_initialized() else time.thread_time
        began_s = clock()
        tensors = list[Tensor]()
        values, equal = documents()
        if self._file is not None:
            of_all = list[Tensor]()
            values, equal = _without_tensors(values, tensors), _without_tensors(equal, of_all)
            tensors += [one for one, rank in zip(of_all, cycle(self._turns), strict=False) if rank == self._comm.rank]
        if self._comm.rank == 0:
            values |= {"equal": equal, "turns": self._turns}
        kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
        document = {"tensors": _plain(tuple(kinds)), "values": values}
        text = files.pack("snapshot", document, is_checked=bool(self._kinds))
        cost_s = clock() - began_s
        fits = kinds == self._kinds and _STATE.size + len(text) <= self._text_room
        if not all(self._comm.allgather(fits)):
            self._is_on = self._allocate(len(text), kinds)
            if not self._is_on:
                return False
        began_s = time.perf_counter()
        sent = self._comm.gather(bytes(text) if self._file is None else b"") if self._apart else []
        cost_s += time.perf_counter() - began_s
        began_s = clock()
        if self._areas:
            areas = self._areas[self._count % len(self._areas)]
            for rank, text_of_rank in enumerate(sent):
                if text_of_rank:
                    areas[rank].write(step, memoryview(text_of_rank), [])
            areas[self._comm.rank].write(step, text, tensors)
        self._count += 1
        if self._count > 1:  # the first one waits for what is imported and allocated once
            self._costs_s.append(cost_s + clock() - began_s)
            self._due_at_s = time.monotonic() + statistics.median(self._costs_s) / SHARE
        return True

    def _allocate(self, text_bytes: int, kinds: list[tuple[Any, ...]]) -> bool:
        """Allocate and map the areas of all ranks; return whether they have memory."""
        comm, self._kinds = self._comm, kinds
        self._areas.clear()  # their memory goes with the last tensor in it
        self._text_room = _rounded(2 * (text_bytes + _PAGE), _PAGE)
        room = _rounded(self._text_room + sum(_rounded(_bytes(*kind), _ALIGNED) for kind in kinds), _PAGE)
        rooms = comm.allgather(room)
        written = [0, *self._apart] if comm.rank == 0 else [] if self._file is None else [comm.rank]
        copies, why = self._reserve(rooms) if comm.rank == 0 else (0, "")
        copies = comm.allgather(copies)[0]
        try:
            for copy in range(copies if written else 0):
                starts = _starts(rooms, copy)
                self._areas.append({rank: self._map(rank, starts[rank], rooms[rank]) for rank in written})
        except OSError as error:
            self._areas.clear()
            why = str(error.strerror)
        is_on = copies > 0 and all(comm.allgather(bool(self._areas) or not written))
        if comm.rank == 0 and copies < max(COPIES):
            kept = "one copy of the newest state is kept" if is_on else "the newest state is not kept"
            print_message("note", f"{kept} in memory: {why}.")
        elif comm.rank == 0 and not is_on:
            print_message("note", "the newest state is not kept in memory: a rank cannot map it.")
        return is_on

    def _map(self, rank: int, start: int, room: int) -> _Area:
        assert self._file is not None
        memory = mmap.mmap(self._file, room, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, offset=start)
        if rank != self._comm.rank:
            return _Area(memory=memory, text_room=room, tensors=[])
        in_memory = _tensors(memory, self._text_room, self._kinds)
        return _Area(memory=memory, text_room=self._text_room, tensors=in_memory)

    def _reserve(self, rooms: list[int]) -> tuple[int, str]:
        """Reserve memory for as many copies as fit on this host; return their number and why they are not more."""
        assert self._file is not None
        free, needed = free_memory_bytes(Path("/")), sum(rooms)
        why = f"{2 * needed / 1e6:.0f} MB needed, {free / 1e6:.0f} MB free"
        header = json.dumps({"rooms": rooms}).encode()
        for copies in COPIES:
            if copies * needed <= MOST_OF_FREE * free and len(header) < _HEADER_BYTES:
                try:
                    os.ftruncate(self._file, 0)
                    os.pwrite(self._file, header, 0)
                    os.posix_fallocate(self._file, 0, _starts(rooms, copies)[0])
                except OSError as error:
                    os.ftruncate(self._file, 0)
                    return 0, str(error.strerror)
                return copies, why
        return 0, why


def bring_to_disk(root: Path, file: int, *, keep: int) -> bool:
    """Write the newest whole snapshot to `root` as a checkpoint, if it is newer than those; return whether it was.

    The last `keep` checkpoints are kept. The memory is empty then. On any problem a warning is printed.
    """
    is_written = False
    try:
        try:
            is_written = _write(root, file)
        except OSError as error:
            saved = files.list_checkpoints(root, "step")
            if not (files.is_full(error) and len(saved) > 1 and files.can_resume(root, saved[-1][0])):
                raise
            files.remove(saved[0][1])  # as the writer does
            is_written = _write(root, file)
        for _, old in files.list_checkpoints(root, "step")[:-keep] if is_written else ():
            files.remove(old)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        reason = getattr(error, "strerror", None) or error
        print_message("warning", f"the newest state in memory is not used, only checkpoints on disk: {reason}")
    os.ftruncate(file, 0)
    return is_written


def _write(root: Path, file: int) -> bool:
    size = os.fstat(file).st_size
    if size <= _HEADER_BYTES:
        return False
    memory = mmap.mmap(file, size, access=mmap.ACCESS_COPY)
    step, starts = max(_whole(memory), default=(TORN, []))
    saved = files.list_checkpoints(root, "step")
    if step <= max((number for number, _ in saved), default=TORN):
        return False
    ranks, shares = zip(*(_read(memory, start) for start in starts), strict=True)
    equal = _with_tensors(ranks[0]["equal"], (next(shares[rank]) for rank in cycle(ranks[0]["turns"])))
    metadata = json.loads(ranks[0]["about"])
    parts = metadata["parts"]
    if any(len({rank["sums"] for rank in ranks[part::parts]}) > 1 for part in range(parts)):
        raise ValueError("replicas differ")
    _count_unreported(metadata, [rank["unreported"] for rank in ranks[::parts]])
    part = files.begin(root, step)
    try:
        names = [files.rank_file_name(rank) for rank in range(len(ranks))]
        contents = [files.pack(name, rank["own"]) for name, rank in zip(names, ranks, strict=True)]
        written = {rank: files.write_rank_file(part, rank, content) for rank, content in enumerate(contents)}
        files.commit(part, {"state": {**ranks[0]["state"], **equal}}, metadata=metadata, ranks=written)
    except BaseException:
        files.discard(part)
        raise
    return True


def _whole(memory: mmap.mmap) -> Iterator[tuple[int, list[int]]]:
    """Yield the step and the places of the areas of each copy that is whole."""
    rooms = json.loads(memory[:_HEADER_BYTES].rstrip(b"\0"))["rooms"]
    for copy in COPIES:
        starts = _starts(rooms, copy - 1)
        if starts[-1] <= len(memory):
            steps = {_STATE.unpack_from(memory, start)[0] for start in starts[:-1]}
            if len(steps) == 1 and (step := steps.pop()) > 0:
                yield step, starts[:-1]


def _read(memory: mmap.mmap, start: int) -> tuple[Any, Iterator[Tensor]]:
    """Return the documents in a rank's area, and its share of the tensors that are equal on all ranks."""
    _, text_bytes, tensors_at = _STATE.unpack_from(memory, start)
    text = memory[start + _STATE.size : start + _STATE.size + text_bytes]
    document = torch.load(io.BytesIO(text), map_location="cpu", weights_only=True)
    kinds = [(getattr(torch, dtype), torch.Size(shape)) for dtype, shape in json.loads(document["tensors"])]
    in_memory = (tensor.clone() for tensor in _tensors(memory, start + tensors_at, kinds))
    equal = document["values"].pop("equal", None)
    return {**_with_tensors(document["values"], in_memory), "equal": equal}, in_memory


def _starts(rooms: list[int], copy: int) -> list[int]:
    """Return where the areas of a copy begin, by rank, and where the last one ends."""
    return list(accumulate(rooms, initial=_HEADER_BYTES + copy * sum(rooms)))


def _tensors(memory: mmap.mmap, start: int, kinds: list[tuple[Any, ...]]) -> list[Tensor]:
    """Return tensors of these types and shapes that lie in the memory one after another."""
    places = accumulate((_rounded(_bytes(*kind), _ALIGNED) for kind in kinds), initial=start)
    content = torch.frombuffer(memory, dtype=torch.uint8)
    return [
        content[first : first + _bytes(dtype, shape)].view(dtype).reshape(shape)
        for (first, _), (dtype, shape) in zip(pairwise(places), kinds, strict=True)
    ]


@lru_cache(maxsize=1)
def _plain(kinds: tuple[tuple[Any, ...], ...]) -> str:
    return json.dumps([[str(dtype).removeprefix("torch."), shape] for dtype, shape in kinds])


def _bytes(dtype: torch.dtype, shape: torch.Size) -> int:
    return dtype.itemsize * shape.numel()


def _rounded(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _without_tensors(value: Any, tensors: list[Tensor]) -> Any:
    """Return the value with a mark for each tensor, and append them to `tensors`."""

    def mark(tensor: Any) -> Any:
        if type(tensor) not in (Tensor, Parameter) or tensor.layout != torch.strided:
            return tensor  # part of the text
        tensors.append(tensor)
        return _TENSOR

    return _mapped(mark, value)


def _with_tensors(value: Any, tensors: Iterator[Tensor]) -> Any:
    return _mapped(lambda leaf: next(tensors) if type(leaf) is str and leaf == _TENSOR else leaf, value)


def _mapped(change: Callable[[Any], Any], value: Any) -> Any:
    """Return the nested value with changed leaves; many times faster than torch's pytrees."""
    kind = type(value)
    if kind in (dict, OrderedDict):
        return kind((key, _mapped(change, one)) for key, one in value.items())
    if kind in (list, tuple):
        return kind([_mapped(change, one) for one in value])
    return change(value)


def _count_unreported(metadata: dict[str, Any], unreported: list[dict[str, Any]]) -> None:
    """Add the steps since the last report to the run's sums and counts."""
    position, result = metadata["position"], metadata["tracker"]["result"]
    for each in unreported:
        position["totals"] = added(position["totals"], each["totals"])
    counts = {"loss_spikes": "loss_spikes", "unreadable": f"unreadable_{metadata['unit']}"}
    for name, counted in counts.items():
        result[counted] += sum(each[name] for each in unreported)
    result["skipped_steps"] += unreported[0]["skipped_steps"]
