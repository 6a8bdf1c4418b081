"""Text <-> hosts: Open MPI, MPICH, -H, Horovod and rankfiles.

Parsing is strict on purpose: launchers misread each other's files silently. hostfiles/README.md has the grammar, and
the interpretation by each launcher.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

from launch.cores import parse_range
from launch.errors import HostfileError
from launch.hosts.host import Entry, Host, error_at, merge, parse_name, parse_slots
from launch.hosts.slurm import from_slurm

Readable = Literal["openmpi", "mpich", "rankfile"]
Writable = Literal["openmpi", "horovod", "mpich", "rankfile"]

MAX_CHARACTERS = 2**20
MAX_LINE_CHARACTERS = 1_024

# Open MPI 4.1 and 5.0 silently truncate a rankfile's list of cores at this length (slot_list in rmaps_rank_file.h).
MAX_CORE_LIST_CHARACTERS = 64

_SLOTS = ("slots", "cpu", "count")  # Open MPI's synonyms, from its hostfile_lex.l
_MAX_SLOTS = {word for slots in _SLOTS for sign in "-_" for word in (f"max{sign}{slots}", f"{slots}{sign}max")}
_ELSEWHERE = {
    **dict.fromkeys(("user", "username", "user-name", "user_name", "port"), "put it into ~/.ssh/config"),
    "binding": "remove it: hvdlaunch binds the ranks itself",
}


def read(text: str, *, name: str) -> tuple[Host, ...]:
    """Parse the hosts of a file, in the order of their first entries.

    `name` is the file's, for errors. The lines determine the notation; a file never mixes two. HostfileError with file
    and line for anything that is not understood.
    """
    lines = list(_lines_of_words(text, name))
    spelling = next(filter(None, (_spelling_of(tokens) for _, tokens in lines)), "openmpi")
    for where, tokens in lines:
        if (other := _spelling_of(tokens)) not in (None, spelling):
            raise error_at(where, " ".join(tokens), f"is {other} in a file that is {spelling}; use one spelling")
    if spelling == "rankfile":
        return merge(_rankfile(lines), f"{name}:1")
    parse = _mpich if spelling == "mpich" else _openmpi
    return merge((parse(where, tokens) for where, tokens in lines), f"{name}:1")


def from_option(text: str) -> tuple[Host, ...]:
    """Parse the hosts of `-H a:8,n[1-3]:8`; one without a number is not counted, slots of repeated hosts add up."""
    if "[" in text and not re.search(r"\[[^]]*:[^]]*\]", text):  # else an IPv6 address
        return from_slurm(text, "-H")
    return merge((_host_colon_slots("-H", word) for word in text.split(",")), "-H")


def write(hosts: Sequence[Host], spelling: Writable) -> str:
    """Return the text of a hostfile for this launcher, one line per host.

    Only Open MPI's notation has `max_slots`. A rankfile numbers the ranks host by host and gives each one core, from 0
    on each host.
    """
    if spelling == "rankfile":
        places = [(host.name, core) for host in hosts for core in range(host.slots)]
        return "".join(f"rank {rank}={name} slot={core}\n" for rank, (name, core) in enumerate(places))
    sign = ":" if spelling == "mpich" else " slots="
    limited = [host.max_slots if spelling == "openmpi" else None for host in hosts]
    limits = ["" if limit is None else f" max_slots={limit}" for limit in limited]
    return "".join(f"{host.name}{sign}{host.slots}{limit}\n" for host, limit in zip(hosts, limits, strict=True))


def to_option(hosts: Iterable[Host]) -> str:
    """Format the hosts as `a:8,b:4`, for -H of mpirun and horovodrun."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def _lines_of_words(text: str, name: str) -> Iterator[tuple[str, list[str]]]:
    if len(text) > MAX_CHARACTERS:
        raise HostfileError(f"{name}:1: {len(text)} characters are too many for a hostfile; at most {MAX_CHARACTERS}")
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{name}:{number}"
        if len(line) > MAX_LINE_CHARACTERS:
            raise error_at(where, line, f"has {len(line)} characters; at most {MAX_LINE_CHARACTERS}, one host per line")
        if "\r" in line:
            raise error_at(where, line, "has a carriage return, which launchers refuse; save it with Unix line ends")
        plain = line.partition("#")[0].replace("\t", " ").replace("=", " = ")
        if tokens := [word for word in plain.split(" ") if word]:
            yield where, tokens


def _spelling_of(tokens: list[str]) -> Readable | None:
    """Return the notation of a line; None for a name only, which is equal for Open MPI and MPICH."""
    if tokens[0] == "rank" and "=" in tokens and tokens[1] not in (*_SLOTS, *_MAX_SLOTS):
        return "rankfile"
    if ":" in tokens[0]:
        return "mpich"
    return "openmpi" if len(tokens) > 1 else None


def _openmpi(where: str, tokens: list[str]) -> Entry:
    name = parse_name(where, tokens[0])
    counts: dict[str, int] = {}
    for start in range(1, len(tokens), 3):
        key, *rest = tokens[start : start + 3]
        meant = "slots" if key in _SLOTS else "max_slots"
        if len(rest) != 2 or rest[0] != "=" or key not in (*_SLOTS, *_MAX_SLOTS):
            raise error_at(where, key, _ELSEWHERE.get(key, "is not understood; write host slots=8 or max_slots=8"))
        if meant in counts:
            raise error_at(where, key, f"gives {meant} a second time; remove one")
        counts[meant] = parse_slots(where, rest[1])
    slots = counts.get("slots", counts.get("max_slots", 1))  # like Open MPI, use the limit for a missing number
    limit = counts.get("max_slots")
    host = Host(name=name, slots=slots, max_slots=limit, counted=bool(counts), unit="slot" if limit is None else "rank")
    return Entry(where=where, host=host, adds=not counts)


def _mpich(where: str, tokens: list[str]) -> Entry:
    entry = _host_colon_slots(where, tokens[0])
    if len(tokens) > 1:
        raise error_at(where, tokens[1], _ELSEWHERE.get(tokens[1], "is not understood after a host; write host:8"))
    return entry


def _host_colon_slots(where: str, word: str) -> Entry:
    name, colon, slots = word.partition(":")
    if ":" in slots:
        raise error_at(where, word, "is not host:8; an IPv6 address needs a name in /etc/hosts or ~/.ssh/config")
    host = Host(name=parse_name(where, name), slots=parse_slots(where, slots) if colon else 1, counted=bool(colon))
    return Entry(where=where, host=host)


def _rankfile(lines: list[tuple[str, list[str]]]) -> Iterator[Entry]:
    by_rank: dict[int, Entry] = {}
    for where, tokens in lines:
        match tokens:
            case ["rank", number, "=", name, "slot" | "slots", "=", cores] if re.fullmatch("[0-9]{1,9}", number):
                rank, host = int(number), Host(name=parse_name(where, name), slots=1, unit="rank")
            case _:
                raise error_at(where, " ".join(tokens), "is not a line of a rankfile; write rank 0=host slot=0-3")
        # Without `socket:` Open MPI treats a * as core 0, and 4.1 also treats p1 (physical) as core 0.
        if len(cores) > MAX_CORE_LIST_CHARACTERS or not all(map(_are_cores, re.split("[,;]", cores))):
            at_most = f"in at most {MAX_CORE_LIST_CHARACTERS} characters"
            raise error_at(where, cores, f"are not cores that Open MPI can read; write 0-3,8 or socket:core {at_most}")
        if rank in by_rank:
            raise error_at(where, number, f"is a rank that {by_rank[rank].where} has already; number them 0, 1, 2...")
        by_rank[rank] = Entry(where=where, host=host)
    for expected, rank in enumerate(sorted(by_rank)):
        if rank != expected:
            raise error_at(by_rank[rank].where, str(rank), f"is a rank but {expected} is missing; number them from 0")
        yield by_rank[rank]


def _are_cores(text: str) -> bool:
    """Return whether it is like 4, 0-3, 1:0-3 or 1:*, with an optional socket before the colon."""
    socket, colon, cores = text.rpartition(":")
    if colon and not re.fullmatch("[0-9]+", socket):
        return False
    return parse_range(cores) is not None or (bool(colon) and cores == "*")
