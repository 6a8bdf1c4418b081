"""Pure: hosts and their hardware -> one RankSlot per process.

Ranks fill the hosts in the given order, like `mpirun --map-by slot`. On a host with GPUs local rank i gets the i-th GPU
of the best ring, or of the rank map for known traffic (rank_map), and cores of the GPU's NUMA node.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, zip_longest
from typing import Literal

from launch.cores import runs_of
from launch.errors import PlacementError, SelectionError
from launch.hosts.host import MAX_SLOTS, Host
from launch.hosts.hostfile import to_option
from launch.machine.nvidia import MIG
from launch.machine.topology import IN_MIG_MODE, Gpu, Topology, exclude_busy_gpus, named
from launch.placement.rank_map import map_ranks
from launch.placement.selection import ring_order, select
from launch.placement.traffic import Flow, Traffic, flows, on_host

Cores = tuple[int, ...]
Binding = Literal["numa", "cores", "none"]


@dataclass(frozen=True, kw_only=True)
class RankSlot:
    """The place of one rank."""

    rank: int
    host: str  # as in the host list
    local_rank: int  # 0, 1, 2... on its host
    gpu: int | None  # index in PCI order; None: the rank runs on CPUs
    gpu_uuid: str | None
    shared: bool  # its GPU is busy, but named by --gpus and therefore used
    numa: tuple[int, ...]  # NUMA nodes of its cores; empty if unknown
    cores: Cores  # empty: the rank is not bound
    threads: int | None  # its share of these cores, limited by a CPU quota; None if unknown
    interface: str | None  # on the network that several hosts share
    unfit_ports: tuple[str, ...]  # with several hosts: InfiniBand or RoCE ports that NCCL must not use
    environment: Mapping[str, str | None]  # variables that bind sets, or unsets if None


def hosts_of(slots: Iterable[RankSlot]) -> tuple[Host, ...]:
    """Return the hosts that have ranks, with their numbers of slots."""
    return tuple(Host(name=name, slots=ranks) for name, ranks in Counter(slot.host for slot in slots).items())


def place(
    hosts: Sequence[Host],
    topologies: Mapping[str, Topology],
    *,
    np: int,
    gpus: Literal["all", "none"] | Collection[int],
    binding: Binding,
    ranks_per_replica: int | None = None,
    interfaces: Mapping[str, str] | None = None,
    set_by_user: Collection[str] = (),
    traffic: Traffic | None = None,
) -> tuple[RankSlot, ...]:
    """Assign one slot to each rank; `gpus` is 'all' free ones, 'none' (CPUs) or indices on every host.

    Each `ranks_per_replica` consecutive ranks share a host, in ring order or mapped by their `traffic`. `interfaces`
    are those on the network that several hosts share, by host; variables in `set_by_user` are not changed. With 'all'
    the ranks run on CPUs if no host has a GPU; a GPU given by index may be busy with another program. Raises
    PlacementError if the ranks do not fit.
    """
    share = ranks_per_host(hosts, np, ranks_per_replica)
    require_whole_replicas(ranks_per_replica, [host for host in hosts if host.name in share], np)
    used = {host: named(topologies[host], gpus) for host in share}
    with_gpus = [host for host, topology in used.items() if topology.gpus]
    on_cpus = gpus == "none" or (gpus == "all" and not with_gpus)
    if not on_cpus and len(with_gpus) < len(used):
        bare = next(host for host in used if host not in with_gpus)
        what = f"{with_gpus[0]} has" if with_gpus else "--gpus asks for some"
        raise PlacementError(f"host {bare} has no GPU, but {what}: leave it out, or pass --gpus none")
    require_enough_named(gpus, hosts, np)
    free = {host.name: named(topologies[host.name], gpus).free for host in hosts if host.name in topologies}
    for host, ranks in share.items():
        if free[host] < ranks and not on_cpus:
            spread = _spread(hosts, np, min(free.values()), ranks_per_replica or 1)
            raise PlacementError(_why_too_few(host, used[host], ranks, gpus, spread))
    slots: list[RankSlot] = []
    sent = () if traffic is None else flows(traffic, np)
    for host, ranks in share.items():
        of_host = tuple(on_host(flow, len(slots), ranks) for flow in sent)
        chosen = [None] * ranks if on_cpus else _gpus(host, used[host], ranks, of_host)
        slots += _slots_of(
            host,
            used[host],
            chosen,
            first=len(slots),
            binding=binding,
            interface=(interfaces or {}).get(host),
            unfit=unfit_ports(used[host]) if len(share) > 1 and not on_cpus else (),
            set_by_user=set_by_user,
        )
    return tuple(slots)


def counts_cores(host: Host, topology: Topology) -> bool:
    """Return whether the slots of a host with GPUs are more than these, and not requested for ranks: its cores."""
    return host.counted and host.unit == "slot" and 0 < len(topology.gpus) < host.slots


def with_slots(
    hosts: Sequence[Host],
    topologies: Mapping[str, Topology],
    *,
    np: int | None,
    gpus: Literal["all", "none"] | Collection[int],
    ranks_per_replica: int | None = None,
    listed: bool = True,
) -> tuple[Host, ...]:
    """Return the hosts; those that are uncounted or count cores get a slot for each GPU, in whole replicas.

    If the free GPUs are too few for `np`, all GPUs count, then the cores, so that the placement can report why. Slots
    are not changed on CPUs, nor on counted hosts without a topology. Raises PlacementError without `np` if there is
    neither a GPU nor a number of slots; its remedy depends on whether the user has `listed` the hosts.
    """
    chosen = {host.name: topologies[host.name].gpus for host in hosts if gpus != "none" and host.name in topologies}
    cores = {
        host.name: host.slots for host in hosts if host.name in chosen and counts_cores(host, topologies[host.name])
    }
    uncounted = {
        host.name: own for host in hosts if (own := chosen.get(host.name)) and (not host.counted or host.name in cores)
    }
    unknown = [host.name for host in hosts if not host.counted and host.unit != "node"]
    if np is None and unknown and not uncounted and isinstance(gpus, str):
        why = "--gpus none" if gpus == "none" else "no GPU found"
        more = f" and {len(unknown) - 1} more" if len(unknown) > 1 else ""
        remedy = "-np N, the number of ranks to run on CPUs"
        remedy = "--per-host N, the number of ranks on the CPUs of each host" if listed else remedy
        raise PlacementError(f"{why} on {unknown[0]}{more}: pass {remedy}")
    group = max(1, ranks_per_replica or 1)
    every = {name: len(host_gpus) for name, host_gpus in uncounted.items()}
    free = {name: sum(gpu.unusable is None for gpu in host_gpus) for name, host_gpus in uncounted.items()}
    wanted = {name: free[name] // group * group if isinstance(gpus, str) else len(gpus) for name in uncounted}
    for slots in (wanted, every, every | cores):
        new = [replace(host, slots=slots[host.name], counted=True) if host.name in slots else host for host in hosts]
        filled = tuple(host for host in new if host.slots)
        if filled and (np is None or np <= sum(host.slots for host in filled)):
            break
    return filled


def ranks_per_host(hosts: Sequence[Host], np: int, ranks_per_replica: int | None = None) -> dict[str, int]:
    """Return the ranks of each host that gets any; PlacementError if the hosts have too few slots."""
    room = sum(host.slots for host in hosts)
    if np < 1:
        raise PlacementError(f"-np {np}: a run has at least one rank")
    if np > room:
        places = ", ".join(f"{host.name} {host.slots}" for host in hosts)
        remedy = _more_room(hosts, np, max(1, ranks_per_replica or 1))
        raise PlacementError(f"-np {np} exceeds the {room} available slots ({places}): {remedy}")
    share: dict[str, int] = {}
    for host in hosts:
        share[host.name] = min(host.slots, np)
        np -= share[host.name]
    return {name: ranks for name, ranks in share.items() if ranks}


def _more_room(hosts: Sequence[Host], np: int, group: int) -> str:
    """Return the remedy for too few slots for `np` ranks, if each `group` of them must share a host."""
    each = -(-np // (len(hosts) * group)) * group if hosts else 0
    if any(host.counted for host in hosts) or not 0 < each <= MAX_SLOTS:
        return "name more hosts or slots"
    return f"write {to_option(replace(host, slots=each) for host in hosts)}"


def _spread(hosts: Sequence[Host], np: int, each: int, group: int = 1) -> str | None:
    """Return the options for at most `np` ranks, as many on each of several hosts; None if that does not help."""
    each = min(each, *(host.slots for host in hosts)) // group * group
    return f"-np {min(np, each * len(hosts))} --per-host {each}" if len(hosts) > 1 and each else None


def require_enough_named(gpus: str | Collection[int], hosts: Sequence[Host], np: int) -> None:
    """Raise PlacementError if --gpus names fewer GPUs than a host gets of the `np` ranks."""
    for host, ranks in ranks_per_host(hosts, np).items():
        if not isinstance(gpus, str) and len(gpus) < ranks:
            spread = _spread(hosts, np, len(gpus))
            remedy = f"name more{f', or pass {spread}' if spread else ''}"
            raise PlacementError(f"--gpus names {len(gpus)} for the {ranks} ranks on host {host}: {remedy}")


def require_whole_replicas(ranks_per_replica: int | None, hosts: Sequence[Host], np: int) -> None:
    """Raise PlacementError unless the ranks, and the slots of each host, form whole replicas, if required."""
    if ranks_per_replica is None:
        return
    option = f"--ranks-per-replica {ranks_per_replica}"
    if ranks_per_replica < 1:
        raise PlacementError(f"{option}: a replica has at least one rank")
    if np % ranks_per_replica:
        raise PlacementError(f"{option}: -np {np} is not a multiple of it: pass one that is")
    for host in hosts:
        if host.slots % ranks_per_replica:
            raise PlacementError(
                f"{option}: the {host.slots} slots of host {host.name} are not a multiple of it, but each replica is "
                "on one host: give it other slots with -H"
            )


def _gpus(host: str, topology: Topology, ranks: int, sent: Sequence[Flow]) -> list[Gpu | None]:
    """Return the GPUs of the ranks in ring order, or mapped by what the ranks have `sent`."""
    by_index = {gpu.index: gpu for gpu in topology.gpus}
    usable = exclude_busy_gpus(topology, ranks)
    # Hosts of one kind are computed once: remove differences that do not affect the result.
    alike = [
        replace(gpu, uuid=None, unusable=gpu.unusable and "taken", shared=None, drawbacks=()) for gpu in usable.gpus
    ]
    try:
        ring = _ring(replace(usable, gpus=tuple(alike), numa_nodes=(), interfaces=(), cpu_quota=None), ranks)
    except SelectionError as error:
        raise PlacementError(f"host {host}: {error}") from error
    return [by_index[index] for index in (map_ranks(topology, ring, sent) if sent else ring)]


@lru_cache
def _ring(topology: Topology, ranks: int) -> tuple[int, ...]:
    """Return the ring over the best of the free GPUs."""
    free = [gpu.index for gpu in topology.gpus if gpu.unusable is None]
    return ring_order(topology, free) if len(free) == ranks else select(topology, ranks).best.ring


def _why_too_few(host: str, topology: Topology, ranks: int, gpus: str | Collection[int], spread: str | None) -> str:
    """Explain in one line why a host has too few GPUs for its ranks."""
    unusable = {gpu.index: gpu.unusable for gpu in topology.gpus if gpu.unusable}
    if not isinstance(gpus, str):
        indices = [gpu.index for gpu in topology.gpus]
        if unknown := sorted(set(gpus) - set(indices)):
            return f"host {host} has no GPU {unknown[0]}, it has {', '.join(map(str, indices))}"
        index = next(index for index in gpus if index in unusable)
        slices = f"; MIG: {MIG}" if unusable[index] == IN_MIG_MODE else ""
        return f"GPU {index} of host {host} cannot be used ({unusable[index]}): choose others with --gpus{slices}"
    taken = "; ".join(f"GPU {index}: {why}" for index, why in unusable.items())
    problem = f"host {host} has {topology.free} free GPUs for {ranks} ranks{f' ({taken})' if taken else ''}"
    slices = f"; MIG: {MIG}" if IN_MIG_MODE in unusable.values() else ""
    remedy = f"pass {spread}" if spread else "start fewer ranks there"
    return f"{problem}: {remedy}, or pass --gpus none{slices}"


def _slots_of(
    host: str,
    topology: Topology,
    gpus: Sequence[Gpu | None],
    *,
    first: int,
    binding: Binding,
    interface: str | None,
    unfit: tuple[str, ...],
    set_by_user: Collection[str],
) -> list[RankSlot]:
    """Return the slots of one host, whose ranks start at `first`."""
    on_cpus = _shares(topology, len(gpus))
    near = [own if gpu is None else _near(topology, gpu) for gpu, own in zip(gpus, on_cpus, strict=True)]
    usable = {core for node in topology.numa_nodes for core in node.cores} or {core for own in near for core in own}
    slots = []
    for local_rank, gpu in enumerate(gpus):
        cores = near[local_rank]
        sharing = [other for other in range(len(gpus)) if set(near[other]) & set(cores)]
        # If a container hides most cores, all its ranks would share the visible few: better not to bind.
        bound = binding != "none" and 0 < len(sharing) <= len(cores)
        # A rank on a CPU always computes, and is fastest on cores of its own (docs/explanation/benchmarks.md).
        divided = binding == "cores" or gpu is None
        if divided and any(near[other] != cores for other in sharing):
            bound = False  # partially overlapping lists of cores cannot be divided between ranks
        threads = None if not usable else max(1, len(cores) // len(sharing) if bound else len(usable) // len(gpus))
        if bound and divided:
            cores = split_cores(cores, len(sharing))[sharing.index(local_rank)]
        if topology.cpu_quota is not None:  # a container with --cpus sees all cores
            allowed = max(1, int(topology.cpu_quota / len(gpus)))
            threads = min(threads or allowed, allowed)
        numa = tuple(node.id for node in topology.numa_nodes if set(node.cores) & set(cores))
        slots.append(
            RankSlot(
                rank=first + local_rank,
                host=host,
                local_rank=local_rank,
                gpu=gpu.index if gpu else None,
                gpu_uuid=gpu.uuid if gpu else None,
                shared=gpu is not None and gpu.shared is not None,
                numa=numa or (gpu.numa if gpu else ()),
                cores=cores if bound else (),
                threads=threads,
                interface=interface,
                unfit_ports=unfit,
                environment=rank_environment(threads, interface, unfit, set_by_user),
            )
        )
    return slots


def rank_environment(
    threads: int | None, interface: str | None, unfit: Sequence[str], set_by_user: Collection[str]
) -> dict[str, str | None]:
    """Return the variables that bind sets besides the GPU; user settings of NCCL and OpenMP are kept."""
    # Exclude only these ports; "=" prevents mlx5_1 from matching mlx5_10.
    ours = {
        "OMP_NUM_THREADS": None if threads is None else str(threads),
        **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "HOROVOD_GLOO_IFACE"), interface),
        "NCCL_IB_HCA": f"^={','.join(unfit)}" if unfit else None,
    }
    return {name: value for name, value in ours.items() if value is not None and name not in set_by_user}


def _shares(topology: Topology, ranks: int) -> list[Cores]:
    """Return the cores of each rank on CPUs: those of its share of the NUMA nodes, which ranks may share.

    If a rank would get less than a core, or half of an equal part or less, as where a container has one core of a
    node, each gets such a part.
    """
    nodes = [node.cores for node in topology.numa_nodes if node.cores]
    starts = [rank * len(nodes) // ranks for rank in range(ranks + 1)]
    places = [nodes[start : max(end, start + 1)] for start, end in pairwise(starts)]
    shares = [tuple(sorted(core for node in place for core in node)) for place in places]
    every = [core for node in nodes for core in node]
    least = min((len(own) / shares.count(own) for own in shares), default=0)
    is_uneven = least < 1 or 2 * least * ranks <= len(every)
    return split_cores(tuple(every), ranks) if is_uneven and ranks <= len(every) else shares


def _near(topology: Topology, gpu: Gpu) -> Cores:
    """Return the cores near a rank's GPU."""
    nodes = [node for node in topology.numa_nodes if node.cores]
    usable = {core for node in nodes for core in node.cores}
    # A virtual machine may report all cores as near every GPU, but still its NUMA node.
    node_cores = {core for node in nodes if node.id in gpu.numa for core in node.cores}
    near = set(gpu.cores) & node_cores or set(gpu.cores) or node_cores
    return tuple(sorted(near & usable if usable else near))


def split_cores(cores: Cores, parts: int) -> list[Cores]:
    """Split cores into parts of equal size, or one core more.

    Linux often numbers the second hardware threads of all cores after the first ones, for example 0-23,48-71. A part
    therefore has the same places of each run of numbers.
    """
    order = [core for nth in zip_longest(*runs_of(cores)) for core in nth if core is not None]
    return [
        tuple(sorted(order[part * len(order) // parts : (part + 1) * len(order) // parts])) for part in range(parts)
    ]


def unfit_ports(topology: Topology) -> tuple[str, ...]:
    """Return the InfiniBand and RoCE ports that NCCL must not use, such as mlx5_4:1, in the topology's order.

    These ports are down, or Ethernet on a host with InfiniBand, where they serve management and storage. Among the
    others NCCL itself finds the near ones.
    """
    ports = [(nic.name, port) for nic in topology.nics for port in nic.ports]
    infiniband = any(port.active and not port.ethernet for _, port in ports)
    return tuple(f"{name}:{port.number}" for name, port in ports if not port.active or (port.ethernet and infiniband))
