"""Measurements of check --bandwidth --json: speeds of GPU links, and of all-reduce algorithms."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from launch import documents
from launch.errors import TopologyError
from launch.machine.decode import decode
from launch.machine.topology import Link, Topology
from launch.placement.allreduce import USUAL, ComparedSums

REMEDY = "measure them with hvdlaunch check --bandwidth --json, or leave --measured out"
NOT_MEASURED = "not measured"


@dataclass(frozen=True, kw_only=True)
class GpuLinks:
    """The bandwidth between every two GPUs of one host, measured in both directions at once."""

    host: str  # its name in the host list
    gpus: tuple[int, ...]  # indices in PCI order
    uuids: tuple[str | None, ...]  # by position in gpus
    gb_per_s: tuple[tuple[float | None, ...], ...]  # one way, [gpu][gpu] by position; None on the diagonal


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The content of a file of --measured; at least one of the two fields is set."""

    links: tuple[GpuLinks, ...] = ()
    sums: ComparedSums | None = None  # algorithms for sums over all ranks, if they were compared


def read(text: str, *, name: str, needs_links: bool = False) -> Measured:
    """Parse the output of check; TopologyError, with the file's name, if it has neither links nor sums."""
    try:
        bandwidth = documents.parse(text)["bandwidth"]
        document, compared = bandwidth["gpu_links"], bandwidth.get("sums")
    except (ValueError, KeyError, TypeError, AttributeError):
        raise TopologyError(f"{name}: it is not from hvdlaunch check --bandwidth --json: {REMEDY}") from None
    hosts: tuple[GpuLinks, ...] = decode(document, tuple[GpuLinks, ...], f"{name}: gpu_links")
    sums: ComparedSums | None = decode(compared, ComparedSums | None, f"{name}: sums")
    if not hosts and (needs_links or sums is None):
        raise TopologyError(f"{name}: no host in it has two GPUs that were measured: {REMEDY}")
    for i, links in enumerate(hosts):
        _check(links, f"{name}: gpu_links[{i}]")
    if sums is not None:
        _check_sums(sums, f"{name}: sums")
    return Measured(links=hosts, sums=sums)


def _check_sums(sums: ComparedSums, where: str) -> None:
    names = [way.name for way in sums.ways]
    is_known = set(names) <= set(sums.settings) and len(set(names)) == len(names) and names[:1] == [USUAL]
    times = [seconds for way in sums.ways for seconds in way.times_s]
    is_timed = min(times, default=0.0) > 0 and all(way.rounds_s and all(way.rounds_s) for way in sums.ways)
    if not is_known or not is_timed:
        raise TopologyError(f"{where}.ways: expected {USUAL!r}, then others of {', '.join(sums.settings)}, in seconds")
    if len(sums.hosts) != len(sums.ranks):
        raise TopologyError(f"{where}.ranks: expected a number for each of {len(sums.hosts)} hosts")


def _check(links: GpuLinks, where: str) -> None:
    size = len(links.gpus)
    square = len(links.gb_per_s) == len(links.uuids) == size and all(len(row) == size for row in links.gb_per_s)
    if not square or list(links.gpus) != sorted(set(links.gpus)):
        raise TopologyError(f"{where}: expected each GPU once, from the lowest, and its speed to each other one")
    for a, row in enumerate(links.gb_per_s):
        for b, speed in enumerate(row):
            fits = speed is None if a == b else speed is not None and speed > 0
            if not fits or speed != links.gb_per_s[b][a]:
                raise TopologyError(
                    f"{where}.gb_per_s[{a}][{b}]: expected a positive number, the same both ways, and null for a GPU "
                    f"and itself, found {speed}"
                )


def with_measured(topology: Topology, measured: Sequence[GpuLinks], host: str | None = None) -> Topology:
    """Return the topology with the speeds measured on this host, or on GPUs with these UUIDs.

    GPUs without measurements are marked as unusable. If fewer than two GPUs are free, there is no choice and the
    topology is not changed. Raises TopologyError if the host, or a unique match, is missing.
    """
    if topology.free < 2:
        return topology
    fitting = [links for links in measured if _fits(links, topology, host)]
    if len(fitting) != 1:
        names = ", ".join(links.host for links in fitting or measured)
        why = f"may be any of these: {names}" if fitting else f"has other GPUs than what was measured, {names}"
        raise TopologyError(f"--measured: {f'host {host}' if host else topology.source} {why}: {REMEDY}")
    (links,) = fitting
    place = {index: i for i, index in enumerate(links.gpus)}

    def measured_link(a: int, b: int) -> Link:
        gpus = topology.gpus[a].index, topology.gpus[b].index
        known = set(gpus) <= place.keys()
        gbps = links.gb_per_s[place[gpus[0]]][place[gpus[1]]] if known else topology.links[a][b].gbps
        return dataclasses.replace(topology.links[a][b], gbps=gbps)

    places = range(len(topology.gpus))
    rows = tuple(tuple(measured_link(a, b) for b in places) for a in places)
    marked = topology.marked(lambda gpu: gpu.unusable if gpu.index in place else gpu.unusable or NOT_MEASURED)
    return dataclasses.replace(marked, links=rows, measured=True)


def _fits(links: GpuLinks, topology: Topology, host: str | None) -> bool:
    """Return whether these are GPUs of this host: all by UUID, or by index if the host name matches or is not given."""
    uuid_of = {gpu.index: gpu.uuid for gpu in topology.gpus}
    known = [(uuid, uuid_of.get(index)) for index, uuid in zip(links.gpus, links.uuids, strict=True)]
    if None not in {uuid for both in known for uuid in both}:
        return all(mine == its for mine, its in known)
    others = any(None not in both and both[0] != both[1] for both in known)
    return set(links.gpus) <= set(uuid_of) and not others and host in (None, links.host)
