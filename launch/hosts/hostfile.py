"""Text <-> hosts: Open MPI, MPICH, -H, Horovod, rankfiles, Slurm's node lists and TOML.

Strict on purpose: launchers misread each other's files in silence. hostfiles/README.md has the grammar, and what each
launcher makes of it.
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from launch.cores import core_list
from launch.errors import HostfileError

Readable = Literal["openmpi", "horovod", "mpich", "rankfile", "toml"]
Writable = Literal["openmpi", "horovod", "mpich", "rankfile"]

# Far above any real cluster, so that a slip such as n[0-999999999] is an error and not a full memory.
MAX_HOSTS = 65_536
MAX_SLOTS = 4_096
MAX_CHARACTERS = 2**20
MAX_LINE_CHARACTERS = 1_024

# Open MPI 4.1 and 5.0 cut a rankfile's list of cores here without a word (slot_list in rmaps_rank_file.h).
MAX_CORE_LIST_CHARACTERS = 64

_SLOTS = ("slots", "cpu", "count")  # Open MPI's synonyms, from its hostfile_lex.l
_MAX_SLOTS = {word for one in _SLOTS for sign in "-_" for word in (f"max{sign}{one}", f"{one}{sign}max")}
_ELSEWHERE = {
    **dict.fromkeys(("user", "username", "user-name", "user_name", "port"), "put it into ~/.ssh/config"),
    "binding": "remove it: hvdlaunch binds the ranks itself",
}
_CORES = re.compile(r"(?:[0-9]+:)?[0-9]+(?:-[0-9]+)?|[0-9]+:\*")
_SLURM_ITEM = r"(?:[^,\[\]]|\[[^\[\]]*\])+"


@dataclass(frozen=True, kw_only=True)
class Host:
    """One host and the ranks that it takes."""

    name: str  # as ssh knows it
    slots: int  # at least 1
    max_slots: int | None = None  # Open MPI's limit for oversubscription; None: no limit given


@dataclass(frozen=True, kw_only=True)
class _Entry:
    where: str  # file:line
    host: Host
    adds: bool = True  # to the slots of the same host further up; else it may not stand there


def read(text: str, *, name: str, spelling: Readable | None = None) -> tuple[Host, ...]:
    """The hosts of a file's text, in the order of their first mention.

    `name` is the file's, for errors. Without `spelling` it is found out; a file never mixes two. Anything that is not
    understood is a HostfileError with file and line.
    """
    lines = list(_significant(text, name))
    if spelling is None and (name.endswith(".toml") or (lines and lines[0][1][0].startswith("[["))):
        spelling = "toml"
    if spelling == "toml":
        return _merged(_toml(text, name), f"{name}:1")
    if spelling is None:
        spelling = next((found for found in (_spelling(words) for _, words in lines) if found), "openmpi")
    elif spelling == "horovod":
        spelling = "openmpi"  # the same words; Horovod knows fewer of them
    for where, words in lines:
        found = _spelling(words)
        if found not in (None, spelling):
            raise _error(where, " ".join(words), f"is {found} in a file that is {spelling}; use one spelling")
    if spelling == "rankfile":
        return _merged(_rankfile(lines), f"{name}:1")
    parse = _mpich if spelling == "mpich" else _openmpi
    return _merged((parse(where, words) for where, words in lines), f"{name}:1")


def from_option(text: str) -> tuple[Host, ...]:
    """The hosts of `-H a:8,b:4`; without a number a host has one slot, and one that is repeated adds up."""
    return _merged((_host_colon_slots("-H", word) for word in text.split(",")), "-H")


def from_slurm(nodes: str, tasks_per_node: str | None = None, slots: int | None = None) -> tuple[Host, ...]:
    """The hosts of `node[01-03,07],gpu1:8`, Slurm's own expansion not needed.

    Their slots come from one place: `:8` in the list, `tasks_per_node` (SLURM_TASKS_PER_NODE, as in `2(x3),1`), or
    `slots` for each; else they have one each.
    """
    where = "Slurm's node list"
    if not re.fullmatch(f"{_SLURM_ITEM}(?:,{_SLURM_ITEM})*", nodes):
        raise _error(where, nodes, "is not understood; write node[01-03,07],gpu1")
    hosts: list[tuple[str, int]] = []
    for item in re.findall(_SLURM_ITEM, nodes):
        pattern, colon, suffix = item.partition(":")
        if colon and (tasks_per_node is not None or slots is not None):
            raise _error(where, item, "has its slots twice; remove them here or there")
        count = _count(where, suffix if colon else str(1 if slots is None else slots))
        hosts += [(name, count) for name in _expanded(where, pattern, MAX_HOSTS - len(hosts))]
    if tasks_per_node is not None:
        counts = _tasks(tasks_per_node, len(hosts))
        hosts = [(name, count) for (name, _), count in zip(hosts, counts, strict=True)]
    checked = (Host(name=_name(where, name), slots=count) for name, count in hosts)
    return _merged((_Entry(where=where, host=host) for host in checked), where)


def write(hosts: Sequence[Host], spelling: Writable) -> str:
    """The text of a hostfile that its launcher reads right, one line per host.

    Only Open MPI's can hold `max_slots`. A rankfile numbers the ranks host by host and gives each one core, counted
    from 0 on each host; `write_rankfile` takes other cores.
    """
    match spelling:
        case "openmpi":
            limits = ["" if host.max_slots is None else f" max_slots={host.max_slots}" for host in hosts]
            lines = [f"{host.name} slots={host.slots}{limit}\n" for host, limit in zip(hosts, limits, strict=True)]
        case "horovod":
            lines = [f"{host.name} slots={host.slots}\n" for host in hosts]
        case "mpich":
            lines = [f"{host.name}:{host.slots}\n" for host in hosts]
        case "rankfile":
            places = [(host.name, core) for host in hosts for core in range(host.slots)]
            return write_rankfile([(rank, name, (core,)) for rank, (name, core) in enumerate(places)])
    return "".join(lines)


def option(hosts: Iterable[Host]) -> str:
    """The hosts as `a:8,b:4`, for mpirun's and horovodrun's -H."""
    return ",".join(f"{host.name}:{host.slots}" for host in hosts)


def write_rankfile(ranks: Iterable[tuple[int, str, Sequence[int]]]) -> str:
    """A rankfile from (rank, host, cores), in the order of the ranks.

    Cores are counted as Open MPI counts them: cores, not hardware threads, in the machine's own order from 0.
    """
    lines = []
    for rank, name, cores in sorted(ranks, key=lambda one: one[0]):
        listed = core_list(cores)
        if not 0 < len(listed) <= MAX_CORE_LIST_CHARACTERS:
            problem = f"as its cores; Open MPI reads 1 to {MAX_CORE_LIST_CHARACTERS} characters: choose neighbours"
            raise HostfileError(f"rankfile: rank {rank} on {name} has {_shown(listed)} {problem}")
        lines.append(f"rank {rank}={name} slot={listed}\n")
    return "".join(lines)


def _shown(value: str) -> str:
    # ascii() unmasks look-alikes and control characters.
    return ascii(value if len(value) <= 60 else f"{value[:57]}...")


def _error(where: str, value: str, problem_and_remedy: str) -> HostfileError:
    return HostfileError(f"{where}: {_shown(value)} {problem_and_remedy}")


def _significant(text: str, name: str) -> Iterator[tuple[str, list[str]]]:
    if len(text) > MAX_CHARACTERS:
        raise HostfileError(f"{name}:1: {len(text)} characters are no hostfile; at most {MAX_CHARACTERS}")
    for number, line in enumerate(text.split("\n"), 1):
        where = f"{name}:{number}"
        if len(line) > MAX_LINE_CHARACTERS:
            raise _error(where, line, f"has {len(line)} characters; at most {MAX_LINE_CHARACTERS}, one host per line")
        if "\r" in line:
            raise _error(where, line, "has a carriage return, which launchers refuse; save it with Unix line ends")
        plain = line.partition("#")[0].replace("\t", " ").replace("=", " = ")
        if words := [word for word in plain.split(" ") if word]:
            yield where, words


def _spelling(words: list[str]) -> Readable | None:
    """Whose line it is; None for a name alone, which is Open MPI's and MPICH's."""
    if words[0] == "rank" and "=" in words:
        return "rankfile"
    if ":" in words[0]:
        return "mpich"
    return "openmpi" if len(words) > 1 else None


def _openmpi(where: str, words: list[str]) -> _Entry:
    name = _name(where, words[0])
    given: dict[str, int] = {}
    for start in range(1, len(words), 3):
        key, *rest = words[start : start + 3]
        meant = "slots" if key in _SLOTS else "max_slots"
        if len(rest) != 2 or rest[0] != "=" or key not in (*_SLOTS, *_MAX_SLOTS):
            raise _error(where, key, _ELSEWHERE.get(key, "is not understood; write host slots=8 or max_slots=8"))
        if meant in given:
            raise _error(where, key, f"gives {meant} a second time; remove one")
        given[meant] = _count(where, rest[1])
    slots = given.get("slots", given.get("max_slots", 1))  # Open MPI, too, takes the limit for a missing number
    host = Host(name=name, slots=slots, max_slots=given.get("max_slots"))
    return _Entry(where=where, host=host, adds=not given)


def _mpich(where: str, words: list[str]) -> _Entry:
    entry = _host_colon_slots(where, words[0])
    if len(words) > 1:
        raise _error(where, words[1], _ELSEWHERE.get(words[1], "is not understood after a host; write host:8"))
    return entry


def _host_colon_slots(where: str, word: str) -> _Entry:
    name, colon, slots = word.partition(":")
    if ":" in slots:
        raise _error(where, word, "is not host:8; an IPv6 address needs a name in /etc/hosts or ~/.ssh/config")
    host = Host(name=_name(where, name), slots=_count(where, slots) if colon else 1)
    return _Entry(where=where, host=host)


def _rankfile(lines: list[tuple[str, list[str]]]) -> Iterator[_Entry]:
    by_rank: dict[int, _Entry] = {}
    for where, words in lines:
        match words:
            case ["rank", number, "=", name, "slot" | "slots", "=", cores] if re.fullmatch("[0-9]{1,9}", number):
                rank, host = int(number), Host(name=_name(where, name), slots=1)
            case _:
                raise _error(where, " ".join(words), "is no line of a rankfile; write rank 0=host slot=0-3")
        # Without `socket:` Open MPI takes a * for core 0, and 4.1 takes p1 (physical) for core 0 as well.
        if len(cores) > MAX_CORE_LIST_CHARACTERS or not all(map(_CORES.fullmatch, re.split("[,;]", cores))):
            at_most = f"in at most {MAX_CORE_LIST_CHARACTERS} characters"
            raise _error(where, cores, f"are no cores that Open MPI reads; write 0-3,8 or socket:core {at_most}")
        if rank in by_rank:
            raise _error(where, number, f"is a rank that {by_rank[rank].where} has already; number them 0, 1, 2...")
        by_rank[rank] = _Entry(where=where, host=host)
    for expected, rank in enumerate(sorted(by_rank)):
        if rank != expected:
            raise _error(by_rank[rank].where, str(rank), f"is a rank and {expected} is none; number them 0, 1, 2...")
        yield by_rank[rank]


def _toml(text: str, name: str) -> Iterator[_Entry]:
    import tomllib

    try:
        document = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        at = re.search(r"at line ([0-9]+)", str(error))
        line = at[1] if at else str(text.count("\n") + 1)
        raise HostfileError(f"{name}:{line}: TOML: {error}; see hostfiles/README.md") from error
    tables = document.pop("host", [])
    for key in document:
        raise _error(f"{name}:1", key, 'is not understood; write [[host]], name="a" and slots=8')
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise _error(f"{name}:1", str(tables), "is no list of hosts; write [[host]] above each")
    headers = [n for n, line in enumerate(text.split("\n"), 1) if re.match(r"[ \t]*\[\[", line)]
    for table, number in zip(tables, headers if len(headers) == len(tables) else itertools.repeat(1), strict=False):
        yield _toml_host(f"{name}:{number}", table)


def _toml_host(where: str, table: dict[str, Any]) -> _Entry:
    for key in sorted(table.keys() - {"name", "slots", "max_slots"}):
        raise _error(where, key, "is not understood; a host has name, slots and max_slots")
    name = table.get("name")
    if not isinstance(name, str):
        raise _error(where, str(name), 'is no host name; write name="a"')
    if "slots" not in table:
        raise _error(where, name, "has no slots; write slots=8")
    counts = {key: _count(where, repr(table[key])) for key in ("slots", "max_slots") if key in table}
    host = Host(name=_name(where, name), slots=counts["slots"], max_slots=counts.get("max_slots"))
    return _Entry(where=where, host=host, adds=False)


def _expanded(where: str, pattern: str, room: int) -> Iterator[str]:
    parts = re.split(r"\[([^\[\]]*)\]", pattern)  # text, ranges, text, ranges, text
    ranges = [[_bounds(where, one) for one in part.split(",")] for part in parts[1::2]]
    if math.prod(sum(last - first + 1 for first, last, _ in one) for one in ranges) > room:
        raise _error(where, pattern, f"makes more than {MAX_HOSTS} hosts; check its ranges")
    choices = [[f"{n:0{width}}" for first, last, width in one for n in range(first, last + 1)] for one in ranges]
    for numbers in itertools.product(*choices):
        yield parts[0] + "".join(map("".join, zip(numbers, parts[2::2], strict=True)))


def _bounds(where: str, text: str) -> tuple[int, int, int]:
    """First, last and the width to fill with zeros of `7`, `8-11` or `08-11`."""
    found = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", text)
    if not found:
        raise _error(where, text, "is no range; write 01-03 or 7")
    first, last = found[1], found[2] or found[1]
    padded = any(len(one) > 1 and one[0] == "0" for one in (first, last))
    if int(last) < int(first) or (padded and len(first) != len(last)):
        raise _error(where, text, "is no range; write the smaller number first, both equally wide as in 01-10")
    return int(first), int(last), len(first)


def _tasks(text: str, hosts: int) -> list[int]:
    where = "SLURM_TASKS_PER_NODE"
    counts: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"([0-9]+)(?:\(x([0-9]{1,9})\))?", item)
        if not found:
            raise _error(where, item, "is not understood; write 2(x3),1")
        # Never more than one too many, however large x is.
        counts += [_count(where, found[1])] * min(int(found[2] or 1), hosts + 1 - len(counts))
    if len(counts) != hosts:
        raise _error(where, text, f"does not fit {hosts} hosts; give one number for each, as in 2(x3),1")
    return counts


def _count(where: str, text: str) -> int:
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise _error(where, text, f"is no number of slots; write a whole number from 1 to {MAX_SLOTS}")
    return int(text)


def _name(where: str, text: str) -> str:
    if "@" in text:
        raise _error(where, text, "names a user; write the host alone and put the user into ~/.ssh/config")
    if ":" in text:
        raise _error(where, text, "is no host name; an IPv6 address needs a name in /etc/hosts or ~/.ssh/config")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
        raise _error(where, text, "is no host name; use letters, digits, '-', '_' and '.', no '-' or '.' in front")
    if len(text) > 253 or not all(1 <= len(label) <= 63 for label in text.split(".")):
        raise _error(where, text, "is no host name; use 1 to 63 characters between two dots and 253 in all")
    return text


def _merged(entries: Iterable[_Entry], start: str) -> tuple[Host, ...]:
    hosts: dict[str, Host] = {}
    for entry in entries:
        host, before = entry.host, hosts.get(entry.host.name)
        if before is not None and not entry.adds:  # so does Open MPI; the second line is a slip more often than a wish
            raise _error(entry.where, host.name, "has its slots further up; write one line for each host")
        if before is not None:
            host = Host(name=host.name, slots=before.slots + host.slots, max_slots=before.max_slots)
        if host.slots > MAX_SLOTS:
            raise _error(entry.where, host.name, f"has {host.slots} slots in all; at most {MAX_SLOTS}")
        if host.max_slots is not None and host.max_slots < host.slots:
            limits = f"{host.max_slots} for {host.slots} slots"
            raise _error(entry.where, host.name, f"has max_slots {limits}; raise max_slots or remove it")
        hosts[host.name] = host
        if len(hosts) > MAX_HOSTS:
            raise _error(entry.where, host.name, f"is one host too many; at most {MAX_HOSTS}")
    if not hosts:
        raise HostfileError(f"{start}: no host; write one per line, as in: a slots=8")
    return tuple(hosts.values())
