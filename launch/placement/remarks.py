"""Pure: notes for the user about the GPUs of a run."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from launch.errors import harmless
from launch.machine.nvidia import speeds_by_name
from launch.machine.nvidia_smi import SOURCE
from launch.machine.topology import OUTSIDE, Gpu, Topology, usable_cores
from launch.placement.findings import named
from launch.placement.slots import RankSlot

MOST_PER_CORE = 8  # ranks; the load of a program is unknown, but more ranks per core hardly ever make progress


def gpu_remarks(slots: Sequence[RankSlot], topologies: Mapping[str, Topology]) -> tuple[str, ...]:
    """Return one line each for GPUs in use, each drawback of some GPUs, hosts without NVML, and mixed models."""
    gpus = {(host, gpu.index): gpu for host, topology in topologies.items() for gpu in topology.gpus}
    chosen = [(slot.host, gpus[slot.host, slot.gpu], slot.shared) for slot in slots if slot.gpu is not None]
    named_ones = [(gpu.shared or gpu.unusable, host, gpu) for host, gpu, shared in chosen if shared]
    in_use = _places((f"{why}, used because --gpus names it", host, gpu) for why, host, gpu in named_ones)
    drawbacks = _places((drawback, host, gpu) for host, gpu, _ in chosen for drawback in gpu.drawbacks)
    lines = [f"warning: {places}: {what}" for what, places in (in_use | drawbacks).items()]
    if by_text := dict.fromkeys(host for host, _, _ in chosen if topologies[host].source == SOURCE):
        lines.append(unseen_by_nvidia_smi(list(by_text)))
    lines += without_speeds({host: topologies[host] for host, _, _ in chosen})
    models = _places((harmless(gpu.name), host, gpu) for host, gpu, _ in chosen if gpu.name is not None)
    if len(models) > 1:
        unlike = "; ".join(f"{name} ({places})" for name, places in models.items())
        lines.append(f"warning: unlike GPUs, each step waits for the slowest: {unlike}")
    return tuple(lines)


def crowded(slots: Sequence[RankSlot], topologies: Mapping[str, Topology], group: int = 1) -> str | None:
    """Warn if hosts have more than MOST_PER_CORE ranks for each core that a run may use; None if no host does.

    The remedy keeps each `group` of ranks on one host.
    """
    ranks = Counter(slot.host for slot in slots)
    known = {host: topologies[host] for host in ranks}
    cores = {host: min(len(usable_cores(own)), own.cpu_quota or math.inf) for host, own in known.items()}
    over = [host for host in ranks if cores[host] and ranks[host] > MOST_PER_CORE * cores[host]]
    if not over:
        return None
    places = named([f"{host} ({ranks[host]} ranks, {cores[host]:g} cores)" for host in over])
    each = min(*(int(MOST_PER_CORE * cores[host]) for host in over), *ranks.values())
    each = max(group, each // group * group)
    fewer = f"-np {each}" if len(ranks) == 1 else f"-np {each * len(ranks)} --per-host {each}"
    return f"warning: {places}: more than {MOST_PER_CORE} ranks for each core. Start fewer, for example with {fewer}."


def unseen_by_nvidia_smi(hosts: Sequence[str]) -> str:
    """Describe what is unknown about GPUs of hosts without NVML."""
    missed = "memory that hidden processes use, slow PCIe links, displays and missing P2P are not looked at"
    return f"note: {named(hosts)}: NVML is not available, GPU facts come from nvidia-smi: {missed}"


def without_speeds(topologies: Mapping[str, Topology]) -> tuple[str, ...]:
    """Return one line for each model whose links have no known speed."""
    unknown = _places(
        (harmless(gpu.name), host, gpu)
        for host, topology in topologies.items()
        for gpu, row in zip(topology.gpus, topology.links, strict=True)
        if gpu.name and speeds_by_name(gpu.name) is None and any(link.gbps is None and link.kind != "X" for link in row)
    )
    why = "the link speeds of this model are unknown, GPUs are selected by the kinds of their links"
    return tuple(f"note: {name} ({places}): {why}" for name, places in unknown.items())


def left_out(topologies: Mapping[str, Topology]) -> tuple[str, ...]:
    """Return one line for each reason why GPUs of these hosts get no rank, for hosts whose free GPUs all get one."""
    reasons = _places(
        (gpu.unusable, host, gpu)
        for host, topology in topologies.items()
        for gpu in topology.gpus
        if gpu.unusable and gpu.unusable != OUTSIDE
    )
    return tuple(f"note: {places}: {why}, not used" for why, places in reasons.items())


def _places(facts: Iterable[tuple[str, str, Gpu]]) -> dict[str, str]:
    """Group (fact, host, GPU) by fact, and describe the GPUs of each."""
    by_fact: dict[str, list[str]] = {}
    for fact, host, gpu in facts:
        by_fact.setdefault(fact, []).append(f"GPU {gpu.index} of {host}")
    return {fact: named(places) for fact, places in by_fact.items()}
