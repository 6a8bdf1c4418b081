"""Pure: checks GPUs, links and adapters of hosts, and what hvdtrain would lack on them."""

from collections.abc import Collection, Iterator, Mapping
from typing import Literal

from launch.cores import core_list
from launch.hosts.host_facts import HostFacts
from launch.machine.nvidia import MIG
from launch.machine.topology import IN_MIG_MODE, OUTSIDE, Topology
from launch.machine.topology import named as named_gpus
from launch.placement.findings import SETUP, TCP_ALONE, Finding, error, find_outliers, named, warning
from launch.placement.nvlinks import nvlink_findings

RESET = "`nvidia-smi -r -i {gpus}` there as root, with nothing on it, or restart the host"
SLOWED = "look at `nvidia-smi -q -d PERFORMANCE` there, at its slot, power and air, or leave it out with --gpus"


def gpu_findings(
    facts: Mapping[str, HostFacts],
    slots: Mapping[str, int],
    exports: Collection[str],
    gpus: Literal["all"] | Collection[int] = "all",
) -> list[Finding]:
    """Return problems of the GPUs of these hosts; each host runs a number of ranks on `gpus`, those of --gpus.

    `exports` are names of the variables that every rank gets from the launcher.
    """
    whole = {host: of_one.topology for host, of_one in facts.items()}
    topologies = {
        host: own.only([place for place, gpu in enumerate(own.gpus) if gpus == "all" or gpu.index in gpus])
        for host, own in whole.items()
    }
    return [
        *_present({host: named_gpus(own, gpus) for host, own in whole.items()}, slots, must=gpus != "all"),
        *(finding for host, topology in topologies.items() for finding in _of_one_host(host, topology)),
        *(finding for host, own in whole.items() for finding in nvlink_findings(host, own, gpus)),
        *_alike(topologies),
        *(() if TCP_ALONE in exports else _ports(topologies)),
    ]


def training_findings(facts: Mapping[str, HostFacts]) -> list[Finding]:
    """Return what hvdtrain lacks where it is installed; what only some hosts lack is reported as a difference."""
    conditions = {host: of_one.condition for host, of_one in facts.items()}
    software = {host: own.software for host, own in conditions.items() if own is not None and own.software.project}
    findings = []
    for name in ("torch", "Horovod"):
        if {getattr(own, name.lower()) for own in software.values()} == {None}:
            findings += [error(host, name, f"{name} is not installed", SETUP) for host in software]
    for host, own in software.items():
        if facts[host].topology.gpus and own.horovod_has_nccl is False:
            remedy = "run `GPU=1 make setup` there; if it finds no CUDA toolkit, set CUDA_HOME"
            findings.append(error(host, "NCCL built", "Horovod was built without NCCL: no two GPUs can train", remedy))
    return findings


def links(topology: Topology) -> str:
    """Describe the links between a host's GPUs in a few words."""
    kinds = {link.kind == "NV" for link in topology.pairs.values()}
    if not kinds:
        return "-"
    if True in kinds:
        return "NVLink" if kinds == {True} else "NVLink, some pairs"
    speeds = [link.gbps for link in topology.pairs.values()]
    known = [speed for speed in speeds if speed is not None]
    speed = f", {min(known):g} GB/s" if len(known) == len(speeds) else ""  # of the slowest pair
    return f"PCIe{speed}" if all(link.p2p for link in topology.pairs.values()) else f"PCIe{speed}, not straight"


def _present(topologies: Mapping[str, Topology], slots: Mapping[str, int], *, must: bool) -> Iterator[Finding]:
    with_gpus = [host for host, topology in topologies.items() if topology.gpus]
    for host, topology in topologies.items():
        free = topology.free
        if not with_gpus and not must:
            remedy = "look at `nvidia-smi` there, or pass --gpus none if that is meant"
            yield warning(host, "GPUs", "no GPU, ranks would run on CPU", remedy)
        elif not topology.gpus:
            remedy = "look at `nvidia-smi` there, or leave the host out"
            where = f"on {named(with_gpus)}" if with_gpus else "--gpus names some"
            yield error(host, "GPUs", f"no GPU, but {where}", remedy)
        elif free < slots.get(host, 0):
            remedy = f"list it as {host}:{free}, or free the others" if free else "free some, or leave the host out"
            problem = f"{free} of {len(topology.gpus)} GPUs are free for {slots[host]} ranks"
            yield error(host, "GPUs", problem, remedy)


def _of_one_host(host: str, topology: Topology) -> Iterator[Finding]:
    facts: dict[str, list[int]] = {}
    for gpu in topology.gpus:
        for fact in (*([gpu.unusable] if gpu.unusable else ()), *gpu.drawbacks):
            facts.setdefault(fact, []).append(gpu.index)
    for fact, indices in facts.items():
        gpus = core_list(indices)
        if fact == IN_MIG_MODE:
            yield warning(host, "GPUs", f"GPU {gpus}: in MIG mode, not used", MIG)
        elif fact.startswith("busy"):
            yield warning(host, "GPUs", f"GPU {gpus}: {fact}", "wait for it, or end it, or name others with --gpus")
        elif fact.startswith("unhealthy"):
            yield error(host, "GPU health", f"GPU {gpus}: {fact}", RESET.format(gpus=gpus))
        elif fact != OUTSIDE:
            remedy = RESET.format(gpus=gpus) if "memory waits" in fact else SLOWED
            yield warning(host, "GPU health", f"GPU {gpus}: {fact}", remedy)
    blocked = [pair for pair, link in topology.pairs.items() if not link.p2p]
    if blocked:
        a, b = (topology.gpus[place].index for place in blocked[0])
        remedy = "turn off ACS and the IOMMU in its BIOS, or choose others: NCCL goes through the host's memory"
        more = f" and {len(blocked) - 1} more pairs" if len(blocked) > 1 else ""
        yield warning(host, "links", f"GPU {a} and {b}{more} cannot copy straight to each other", remedy)


def _alike(topologies: Mapping[str, Topology]) -> Iterator[Finding]:
    models = {
        host: " and ".join(sorted({gpu.name or "unknown" for gpu in own.gpus})) for host, own in topologies.items()
    }
    slow = "take GPUs of one model: each step waits for the slowest"
    for host, topology in topologies.items():
        if len({gpu.name for gpu in topology.gpus}) > 1:
            yield warning(host, "GPU model", f"unlike GPUs, {models[host]}", slow)
    for odd in find_outliers({host: model for host, model in models.items() if model}):
        yield warning(odd.hosts, "GPU model", odd.describe("the GPUs are"), slow)


def _ports(topologies: Mapping[str, Topology]) -> Iterator[Finding]:
    """Yield problems of the ports of InfiniBand and RoCE adapters."""
    rates: dict[str, str] = {}
    for host, topology in topologies.items():
        ports = [(nic.name, port) for nic in topology.nics for port in nic.ports]
        for name, port in ports:
            if not port.active:
                remedy = f"look at its cable and at `ibstat {name}` there; hvdlaunch keeps NCCL from it"
                yield warning(host, "NIC port", f"port {port.number} of {name} is down", remedy)
        active = [port.rate_gbps for _, port in ports if port.active]
        if ports:
            rate_list = ", ".join(sorted({f"{rate:g}" for rate in active if rate is not None}))
            rates[host] = f"{len(active)} x {rate_list or 'unknown'} Gb/s" if active else "down"
    up = [host for host, rate in rates.items() if rate != "down"]
    for host in topologies:
        if up and host not in up:
            remedy = f"fix its adapter, or `export {TCP_ALONE}=1` here for TCP on all"
            yield error(host, "NIC port", f"no InfiniBand or RoCE port is up, but on {named(up)}", remedy)
    for odd in find_outliers({host: rates[host] for host in up}):
        problem = odd.describe("ports that are up:")
        yield warning(odd.hosts, "NIC rate", problem, "look at cables, switch ports and `ibstat` there")
