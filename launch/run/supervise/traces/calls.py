"""Which rank waits in which call, and which rank made a call that others did not make.

Each rank of hvdtrain leaves its last calls in `ranks/rank-<r>.calls`; the format: hvdtrain/settings/safety/calls.py.
"""

import re
import struct
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from itertools import groupby, pairwise
from types import MappingProxyType
from typing import NamedTuple

from launch.errors import harmless

KEPT, RECORD_BYTES = 64, 128
RECORD = struct.Struct("<QQB111s")
WORLD, EXCHANGES = "world", "exchanges"
SUM, GRADIENTS = "all-reduce", "gradients"
MAX_NAMED = 8  # ranks, or ranges of them
LIBRARY = re.compile(r"/hvdtrain/\w+/\w+\.py$|/lib/python3|/(site|dist)-packages/|<")


@dataclass(frozen=True, kw_only=True)
class Call:
    """A call of one rank in a group of ranks."""

    number: int  # from 1, in the order of the rank
    waits: bool  # it has not returned
    size: int  # bytes
    kind: str
    name: str = ""
    inside: str = ""  # file and line in hvdtrain
    caller: str = ""  # file and line outside of it
    group: str = WORLD

    @property
    def what(self) -> tuple[object, ...]:
        """Its content, equal on all ranks."""
        return self.kind, self.name, self.size if self.kind == SUM else None

    @property
    def where(self) -> tuple[object, ...]:
        """Its content and its callers, usually equal on all ranks."""
        return *self.what, self.inside, self.caller

    def __str__(self) -> str:
        group = "" if self.group.split()[0] in (WORLD, EXCHANGES) else f" in {self.group}"
        if self.name == GRADIENTS:
            return f"the gradients{group}"
        name = f' "{self.name}"' if self.name else ""
        size = f" of {self.size:,} bytes" if self.kind == SUM else ""
        inside = f" for {self.inside}" if self.inside else ""
        return f"{self.kind}{name}{size}{group}{inside}{f' ({self.caller})' if self.caller else ''}"


Sequence = Mapping[int, Call]  # of one rank in one group, by number
Groups = Mapping[str, Sequence]  # of one rank


class OrderViolation(NamedTuple):
    """Which ranks broke the order, and how."""

    culprits: Collection[int] = ()
    text: str = ""


def parse_calls(content: bytes) -> Groups:
    """Parse the file of a rank; groups without a call are left out."""
    groups: dict[str, Sequence] = {}
    part_bytes = (1 + KEPT) * RECORD_BYTES
    for start in range(0, len(content) - part_bytes + 1, part_bytes):
        group, *_ = _words(content[start : start + RECORD_BYTES])
        calls = {}
        for number, size, waits, text in RECORD.iter_unpack(content[start + RECORD_BYTES : start + part_bytes]):
            if number:
                kind, name, inside, caller, *_ = _words(text)
                of_call = {"kind": kind, "name": name, "inside": inside, "caller": caller, "group": group}
                calls[number] = Call(number=number, waits=bool(waits), size=size, **of_call)
        if calls and group.strip():
            groups[group] = calls
    return groups


def _words(text: bytes) -> list[str]:
    lines = text.rstrip(b"\0").decode(errors="replace").split("\n")
    return [harmless(line) for line in lines] + 3 * [""]


def is_library(file: str) -> bool:
    """Return whether a file of a stack is not the user's."""
    return LIBRARY.search(file) is not None


def compare(
    ranks: Mapping[int, Groups],
    *,
    steps: Mapping[int, str] = MappingProxyType({}),
    outside: Mapping[int, str] = MappingProxyType({}),
    of: str = "hvdtrain",
) -> str | None:
    """Describe where each rank is, and which ranks broke the order; None if no rank waits in a call.

    `ranks` has the calls of each rank by group, `steps` the step of each rank in words, and `outside` the file and line
    of ranks that wait in no call `of` this library.
    """
    waiting = {rank: call for rank, groups in ranks.items() if (call := _waiting(groups)) is not None}
    if not waiting:
        return None
    verdict = _verdict(ranks, waiting)
    places = defaultdict[str, list[int]](list)
    for rank, groups in ranks.items():
        if (call := waiting.get(rank)) is not None:
            step = f" {steps[rank]}" if call.name == GRADIENTS and rank in steps else ""
            place = f"waits in {call}{step}, its call {call.number:,}"
        else:
            of_group = groups.get(WORLD) or next(iter(groups.values()))
            last, at = of_group[max(of_group)], f" ({outside[rank]})" if rank in outside else ""
            place = f"is outside of {of}'s calls{at}, its last was {last}, call {last.number:,}"
        places[place].append(rank)
    culprits_first = sorted(places.items(), key=lambda place: place[1][0] not in verdict.culprits)
    parts = [f"{named(there)} {place if len(there) == 1 else _plural(place)}" for place, there in culprits_first]
    return "; ".join(parts) + (f": {verdict.text}" if verdict.text else "")


def _waiting(groups: Groups) -> Call | None:
    """Return the call in which a rank waits: only the newest of a group can be."""
    newest = [calls[max(calls)] for calls in groups.values()]
    return next((call for call in reversed(newest) if call.waits), None)


def _plural(place: str) -> str:
    verb, _, rest = place.partition(" ")
    return f"{'wait' if verb == 'waits' else 'are'} {rest.replace(', its ', ', their ')}"


def _verdict(ranks: Mapping[int, Groups], waiting: Collection[int]) -> OrderViolation:
    names = dict.fromkeys(name for groups in ranks.values() for name in groups if name != EXCHANGES)
    groups = [{rank: of_rank[name] for rank, of_rank in ranks.items() if name in of_rank} for name in names]
    for group in groups:
        if (number := _first_difference(group)) is not None:
            return _judge(group, number)
    late_ranks = [late for group in groups if (late := _late(group))]
    for late in late_ranks:
        if idle := [rank for rank in late if rank not in waiting]:
            return OrderViolation(idle)
    if late_ranks:
        return OrderViolation(late_ranks[0], f"{named(late_ranks[0])} did not make a call that others wait in")
    return OrderViolation()


def _late(group: Mapping[int, Sequence]) -> list[int]:
    """Return the ranks that have made fewer calls than others."""
    counts = {rank: max(calls) for rank, calls in group.items()}
    return [rank for rank, count in counts.items() if count == min(counts.values()) < max(counts.values())]


def _first_difference(group: Mapping[int, Sequence]) -> int | None:
    """Return the number of the first call that is not the same on all ranks, of those that all have kept.

    Equal calls may have different callers. Callers count if they differ in every call up to the first other one or the
    last: calls of one kind without a name match each other, though one of them is too many.
    """
    common = sorted(set.intersection(*map(set, group.values())))

    def differ(number: int, key: str) -> bool:
        return len({getattr(calls[number], key) for calls in group.values()}) > 1

    first = next((place for place, number in enumerate(common) if differ(number, "what")), len(common))
    while first > 0 and differ(common[first - 1], "where"):
        first -= 1
    return common[first] if first < len(common) else None


def _judge(group: Mapping[int, Sequence], number: int) -> OrderViolation:
    """Return which ranks differ from the others in this call: the fewest, or those whose call is not usual there."""
    key = "what" if len({calls[number].what for calls in group.values()}) > 1 else "where"
    sides = defaultdict[object, list[int]](list)
    for rank, calls in group.items():
        sides[getattr(calls[number], key)].append(rank)

    def is_usual(rank: int) -> bool:
        """Return whether the same call has followed the call before it earlier."""
        before = [call.where for at, call in sorted(group[rank].items()) if at < number]
        return (*before[-1:], group[rank][number].where) in set(pairwise(before))

    others, odd, *more = sorted(sides.values(), key=lambda side: (-len(side), not is_usual(side[0])))
    if len(others) == len(odd) and is_usual(others[0]) == is_usual(odd[0]):
        return OrderViolation((), f"their calls differ from call {number:,} on")
    whats = [call.what for at, call in sorted(group[odd[0]].items()) if at < number]
    follows = (group[others[0]][number].what, group[odd[0]][number].what) in set(pairwise(whats))
    left_out = follows or (is_usual(odd[0]) and not is_usual(others[0]))
    them = f"rank {others[0]}" if len(others) == 1 else "the others"
    deed = f"left out a call that {them} made" if left_out else f"made a call that {them} did not"
    calls = group[others[0] if left_out else odd[0]]
    which = "" if calls[number].waits else f", {calls[number]}, call {number:,}"
    culprits = sorted(sum(more, odd))
    return OrderViolation(culprits, f"{named(culprits)} {deed}{which}")


def named(ranks: Collection[int]) -> str:
    """List ranks by number; three and more in a row are a range."""
    texts = []
    for _, run in groupby(enumerate(sorted(ranks)), lambda item: item[1] - item[0]):
        row = [str(rank) for _, rank in run]
        texts += [f"{row[0]}-{row[-1]}"] if len(row) > 2 else row
    more = [f"{len(texts) - MAX_NAMED} more"] if len(texts) > MAX_NAMED else []
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join([*texts[:MAX_NAMED], *more])}"
