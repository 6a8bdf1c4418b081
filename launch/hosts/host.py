"""A host with its slots, and the checks for every host list."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal

from launch.errors import HostfileError

# Far above any real cluster, so that a mistake such as n[0-999999999] is an error and does not fill the memory.
MAX_HOSTS = 65_536
MAX_SLOTS = 4_096


@dataclass(frozen=True, kw_only=True)
class Host:
    """A host and the number of its ranks."""

    name: str  # as known to ssh
    slots: int  # at least 1
    max_slots: int | None = None  # Open MPI's limit for oversubscription; None: not given
    counted: bool = field(default=True, compare=False)  # False: listed once without a number, and slots is 1
    # What its number counts. "rank": requested for ranks. "slot": maybe cores, so a host has at most as many ranks as
    # GPUs. "node": one task that has the whole node; its GPUs are counted, and without GPUs it is one rank.
    unit: Literal["rank", "slot", "node"] = field(default="slot", compare=False)


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An entry for a host in a list."""

    where: str  # file:line
    host: Host
    adds: bool = True  # its slots are added to an earlier entry of the host; False: an earlier entry is an error


def parse_slots(where: str, text: str) -> int:
    """Parse a number of slots from 1 to MAX_SLOTS; HostfileError, with `where`, for anything else."""
    if not re.fullmatch("[0-9]{1,9}", text) or not 1 <= int(text) <= MAX_SLOTS:
        raise error_at(where, text, f"is not a number of slots; write an integer from 1 to {MAX_SLOTS}")
    return int(text)


def parse_name(where: str, text: str) -> str:
    """Return the text if every launcher accepts it as a name or IPv4 address; else raise HostfileError."""
    if "@" in text:
        raise error_at(where, text, "names a user; write the host alone and put the user into ~/.ssh/config")
    if ":" in text:
        raise error_at(where, text, "is not a host name; an IPv6 address needs a name in /etc/hosts or ~/.ssh/config")
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", text):
        raise error_at(where, text, "is not a host name; use letters, digits, '-', '_' and '.', no '-' or '.' in front")
    if len(text) > 253 or not all(1 <= len(label) <= 63 for label in text.split(".")):
        raise error_at(where, text, "is not a host name; use 1 to 63 characters between two dots and 253 in all")
    return text


def merge(entries: Iterable[Entry], start: str) -> tuple[Host, ...]:
    """Return each host once, in the order of first entries; `start` is the place for an error about an empty list."""
    hosts: dict[str, Host] = {}
    for entry in entries:
        host, before = entry.host, hosts.get(entry.host.name)
        if before is not None and not entry.adds:  # unlike Open MPI, which adds: a repeated line is usually a mistake
            raise error_at(entry.where, host.name, "has its slots further up; write one line for each host")
        if before is not None:
            host = replace(before, slots=before.slots + host.slots, counted=True)
        if host.slots > MAX_SLOTS:
            raise error_at(entry.where, host.name, f"has {host.slots} slots in all; at most {MAX_SLOTS}")
        if host.max_slots is not None and host.max_slots < host.slots:
            limits = f"{host.max_slots} for {host.slots} slots"
            raise error_at(entry.where, host.name, f"has max_slots {limits}; raise max_slots or remove it")
        hosts[host.name] = host
        if len(hosts) > MAX_HOSTS:
            raise error_at(entry.where, host.name, f"is one host too many; at most {MAX_HOSTS}")
    if not hosts:
        raise HostfileError(f"{start}: no host; write one per line, as in: a slots=8")
    return tuple(hosts.values())


def shown(value: str) -> str:
    """Quote a value for an error message, shortened if it is long."""
    # ascii() reveals look-alikes and control characters.
    return ascii(value if len(value) <= 60 else f"{value[:57]}...")


def error_at(where: str, value: str, problem_and_remedy: str) -> HostfileError:
    """Return the error about a value at a place."""
    return HostfileError(f"{where}: {shown(value)} {problem_and_remedy}")
